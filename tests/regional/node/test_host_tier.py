"""The host tier of a node that computes on a device: a stand-in device, whose KV has its double in
the shared memory and is not that memory."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from core.engine.plan import LoadedModel, Row, StepPlan
from core.kv.memory import allocate, attach
from core.types import BLOCK_TOKENS
from tests.regional.node import engine_rank
from tests.regional.node.engine_rank import _Shards
from tests.regional.node.little import LittleNode, little_region
from tests.regional.node.little_parts import cached_of, direct, ids_of
from tests.regional.node.test_tiers import BLOCKS, NODES, PROMPT, setup, shelf_of, twice

DEVICES: list[mmap.mmap] = []


class Device(_Shards):
    """Computes in memory of its own; what a row fills is copied out, what arrives is copied in."""

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        own = super().load(progress)
        size = own.geometry.pool_bytes
        self._geometry = own.geometry
        self._device = attach(own.memory_fd, size)
        descriptor, self._shared = allocate(size)
        DEVICES.append(self._device)
        self.loaded = [replace(own, memory_fd=descriptor)]
        return self.loaded[0]

    def submit(self, plan: StepPlan):  # type: ignore[no-untyped-def] # the handle is scripted's own
        handle = super().submit(plan)
        for row in plan.rows:
            self._copy(_filled(row), self._device, self._shared)
        return handle

    def arrive(self, groups: Sequence[Sequence[int]]) -> None:
        self._copy(groups, self._shared, self._device)

    def _copy(self, groups: Sequence[Sequence[int]], source: mmap.mmap, to: mmap.mmap) -> None:
        for group, blocks in enumerate(groups):
            for block in blocks:
                start, end = self._geometry.block_span(group, block)
                to[start:end] = source[start:end]


def _filled(row: Row) -> list[tuple[int, ...]]:
    """The blocks that a row writes in, of each group."""
    first = row.start // BLOCK_TOKENS
    last = -(-(row.start + len(row.token_ids)) // BLOCK_TOKENS)
    return [table[first:last] for table in row.block_tables]


@pytest.fixture(autouse=True)
def _on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    DEVICES.clear()
    monkeypatch.setattr(engine_rank, "_Shards", Device)
    monkeypatch.setattr("regional.node.tiers.pool_tiers.pays", lambda *_: True)


def device_of(_: LittleNode) -> bytes:
    return DEVICES[-1][:]


def test_what_the_device_had_no_room_for_comes_back_from_the_host() -> None:
    async def test() -> None:
        tiers = {"d": setup(host=1 << 20)}
        async with little_region(*NODES, tiers=tiers, blocks=14) as region:
            node = region.nodes["d"]
            fresh = await twice(region)
            await region.answer("y" + PROMPT, direct("d"))  # takes the room of the first
            device = device_of(node)
            again = await region.answer(PROMPT, direct("d"))
            assert (ids_of(again), cached_of(again)) == (fresh, 16 * BLOCKS)
            assert shelf_of(node).counts.loaded > 0
            assert device_of(node) != device

    asyncio.run(test())


def test_a_bounded_host_tier_lets_the_least_used_go() -> None:
    async def test() -> None:
        block = 1024
        tiers = {"d": setup(host=BLOCKS * block)}
        async with little_region(*NODES, tiers=tiers, blocks=40) as region:
            shelf = shelf_of(region.nodes["d"])
            await twice(region)
            await twice(region, prompt="y" + PROMPT)
            assert (len(shelf), shelf.counts.evicted) == (BLOCKS, BLOCKS)

    asyncio.run(test())


def test_a_purge_overwrites_the_device_too() -> None:
    async def test() -> None:
        async with little_region(*NODES, tiers={"d": setup(host=1 << 20)}) as region:
            node = region.nodes["d"]
            await twice(region)
            assert any(device_of(node))
            (told,) = await region.router.purges.everywhere("")
            assert told.host_blocks == BLOCKS
            node.rank.wake()
            async with asyncio.timeout(30):
                while any(device_of(node)):
                    await asyncio.sleep(0.001)
            assert cached_of(await region.answer(PROMPT, direct("d"))) == 0

    asyncio.run(test())
