"""The tiers of all pools of a node."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping

from core.engine.lending_messages import Held
from core.engine.messages import (
    SequenceFailed,
)
from core.kv.tiers.shelf import Shelf
from regional.node.imports import Aside
from regional.node.pool import Pool
from regional.node.tiers.pool_tiers import PoolTiers
from regional.pb import node_pb2 as pb


class NodeTiers:
    """By the number of the pool; see `imports.Tier`. A pool without tiers is missing."""

    def __init__(self, pools: Mapping[int, PoolTiers]) -> None:
        self._pools = pools

    def reach(self, pool: Pool, token_ids: tuple[int, ...], namespace: str) -> int:
        tiers = self._pools.get(pool.number)
        return tiers.reach(token_ids, namespace) if tiers is not None else 0

    async def fill(self, pool: Pool, aside: Aside) -> None:
        tiers = self._pools.get(pool.number)
        if tiers is not None:
            await tiers.fill(aside)

    def saves(self, pool: Pool) -> bool:
        """Is there a place for what answers lose that are pushed out of the pool's memory?"""
        tiers = self._pools.get(pool.number)
        return tiers is not None and tiers.saves

    async def save(self, pool: Pool, namespace: str, token_ids: tuple[int, ...],
                   blocks: tuple[tuple[int, ...], ...]) -> None:  # fmt: skip
        """See `PoolTiers.save`."""
        await self._pools[pool.number].save(namespace, token_ids, blocks)

    def heard(self, pool: int, message: Held | SequenceFailed) -> None:
        """Something that the rank says of a sequence, ours or not."""
        tiers = self._pools.get(pool)
        if tiers is not None:
            tiers.heard(message)

    def snapshot(self) -> Iterator[pb.NodeMessage]:
        """What lies in the tiers, for a router that has just been joined."""
        for tiers in self._pools.values():
            yield from tiers.snapshot()

    async def run(self) -> None:
        """Keep what is worth it. Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for tiers in self._pools.values():
                tasks.create_task(tiers.run())

    async def forget(self, namespace: str) -> Counter[str]:
        """Everything of a namespace, for ever: blocks by tier."""
        gone: Counter[str] = Counter()
        for tiers in self._pools.values():
            gone.update(await tiers.forget(namespace))
        return gone

    async def close(self) -> None:
        for tiers in self._pools.values():
            await tiers.close()

    @property
    def blocks(self) -> int:
        """Places for blocks that one pool has below its memory, at the most."""
        return max((one.places for one in self._pools.values()), default=0)

    @property
    def bytes_per_s(self) -> float:
        """How fast they are loaded; 0 where there are none."""
        rates = [one.rate.bytes_per_s for one in self._pools.values()]
        return sum(rates) / len(rates) if rates else 0.0

    def status(self) -> list[pb.Tier]:
        """One for each kind of tier, all pools together."""
        kinds: dict[str, list[Shelf]] = {}
        for tiers in self._pools.values():
            for shelf in tiers.shelves:
                kinds.setdefault(shelf.name, []).append(shelf)
        return [_told(name, shelves) for name, shelves in kinds.items()]


def _told(name: str, shelves: list[Shelf]) -> pb.Tier:
    counts = [shelf.counts for shelf in shelves]
    return pb.Tier(
        kind=name,
        off=next((shelf.off for shelf in shelves if shelf.off), ""),
        blocks=sum(len(shelf) for shelf in shelves),
        places=sum(shelf.slots for shelf in shelves),
        written=sum(one.written for one in counts),
        loaded=sum(one.loaded for one in counts),
        evicted=sum(one.evicted for one in counts),
        refused=sum(one.refused for one in counts),
        damaged=sum(one.damaged for one in counts),
        foreign=sum(one.foreign for one in counts),
        failed=sum(one.failed for one in counts),
    )
