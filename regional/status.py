"""What the router says about its region: built from its state, published to edges in frames."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from core.config import Node
from core.framing import encode_frame
from core.orders import Orders
from core.status import (
    ModelStatus,
    NodeStatus,
    RankStatus,
    RegionMore,
    RegionPrefixes,
    RegionStatus,
    TierStatus,
    Wanted,
)
from core.types import ModelName, NodeName, RegionName, Role
from regional.cluster import ClusterView, Member, NodeView
from regional.hits import Hits
from regional.pb import node_pb2 as pb
from regional.prefixes import Prefixes

MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 1.0


NO_ORDERS = Orders()


def rested(status: NodeStatus, orders: Orders) -> NodeStatus:
    """As drains what rests by order of the operator."""
    if status.name not in orders.nodes:
        return status
    return msgspec.structs.replace(status, draining=True)


def node_status(member: Member, pool: str = "") -> NodeStatus:
    """What the node last said of itself, and what the router has counted for it. `pool`: of the
    topology."""
    view, join, beat = member.view(), member.session.join, member.beat
    return NodeStatus(
        name=view.name,
        role=view.role,
        model=view.offers[0].model,
        pid=join.pid,
        draining=view.draining,
        pool=pool,
        placed=member.placed if pool else 0,
        idle_s=member.idle_s if pool else 0.0,
        running=beat.running,
        waiting=beat.waiting,
        blocks_used=beat.blocks_used,
        blocks_cached=beat.blocks_cached,
        blocks_total=view.offers[0].blocks * len(member.pools),
        prefill_backlog_tokens=sum(one.prefill_tokens for one in member.views()),
        generated_tokens=beat.generated_tokens,
        computed_prompt_tokens=beat.computed_prompt_tokens,
        cached_prompt_tokens=beat.cached_prompt_tokens,
        preemptions=beat.preemptions,
        drafted_tokens=beat.drafted_tokens,
        accepted_tokens=beat.accepted_tokens,
        kv_bytes_sent=beat.kv_bytes_sent,
        kv_bytes_received=beat.kv_bytes_received,
        rank_bytes_sent=beat.rank_bytes_sent,
        rank_bytes_least=beat.rank_bytes_least,
        pipeline_bubble=beat.pipeline_bubble,
        stage_seconds=tuple(beat.stage_seconds),
        plan=join.plan,
        release=join.release,
        ranks=tuple(RankStatus(one.rank, one.pid, one.part) for one in join.ranks),
        tiers=tuple(tier_status(one) for one in beat.tiers),
    )


def tier_status(told: pb.Tier) -> TierStatus:
    return TierStatus(
        kind=told.kind,
        off=told.off,
        blocks=told.blocks,
        places=told.places,
        written=told.written,
        loaded=told.loaded,
        evicted=told.evicted,
        refused=told.refused,
        damaged=told.damaged,
        foreign=told.foreign,
        failed=told.failed,
    )


def absent(
    members: Iterable[Member], nodes: Iterable[Node], running: Collection[str] | None = None
) -> Iterator[NodeStatus]:
    """Those of the region's `nodes` that have not joined, or were lost. `running`: who should be
    there; everybody when None."""
    here = {member.view().name for member in members}
    for node in nodes:
        if node.name not in here:
            yield NodeStatus(
                name=NodeName(node.name),
                role=node.role,
                model=ModelName(node.model),
                alive=False,
                off=running is not None and node.name not in running,
                pool=node.pool or "",
                plan=str(node.parallel),
            )


def model_statuses(
    view: ClusterView,
    models: Iterable[ModelName],
    context: Callable[[ModelName], int],
    start_s: Callable[[ModelName], float | None] = lambda _: None,
) -> tuple[ModelStatus, ...]:
    """The models that have a node which can answer, or for which one is started: `start_s` says in
    how many seconds."""
    found = (_model_status(view, model, context, start_s) for model in models)
    return tuple(one for one in found if one is not None)


def _model_status(
    view: ClusterView,
    model: ModelName,
    context: Callable[[ModelName], int],
    start_s: Callable[[ModelName], float | None],
) -> ModelStatus | None:
    able = list(view.answering(model))
    if not able:
        soon_s = start_s(model) if model in view.startable else None
        if soon_s is None:
            return None
        return ModelStatus(name=model, context=context(model), start_s=soon_s)
    return ModelStatus(
        name=model,
        context=context(model),
        prefill_tokens_per_s=sum(n.prefill_tokens_per_s for n in view.readers() if n.offer(model)),
        decode_tokens_per_s=max(n.decode_tokens_per_s for n in able),
    )


def prefill_work_s(view: ClusterView) -> float:
    """Seconds that the region's readers need for the prompts in flight."""
    rate = sum(node.prefill_tokens_per_s for node in view.readers())
    return sum(node.prefill_tokens for node in view.nodes) / rate if rate else 0.0


def decode_work_s(view: ClusterView) -> float:
    """Seconds until the answers in flight are written, were all slots of the region at work."""
    rate = sum(node.decode_tokens_per_s * node.max_sequences for node in view.decoders())
    return sum(node.answer_tokens for node in view.nodes) / rate if rate else 0.0


def fullest_pool(members: Iterable[Member]) -> float:
    """Share of blocks in use on the decode-capable node that has the fewest left."""
    shares = (
        member.beat.blocks_used / (offer.blocks * len(member.pools))
        for member in members
        if member.role is not Role.PREFILL
        for offer in member.offers
        if offer.blocks
    )
    return max(shares, default=0.0)


def can_answer(nodes: Iterable[NodeView], model: ModelName) -> bool:
    return any(node.role is not Role.PREFILL and node.offer(model) for node in nodes)


@dataclass(frozen=True, slots=True)
class PrefixesSeen:
    """Which prefix frame a stream has told last."""

    version: int = 0
    base: int = 0


class Publisher:
    """Turns "something changed" into frames: on change, at most ten a second, one at the least.

    `build` gives a status without epoch and sequence of this publisher's, which are added here.
    """

    def __init__(self, build: Callable[[], RegionStatus], prefixes: Prefixes) -> None:
        self._build = build
        self._prefixes = prefixes
        self._told = RegionPrefixes(region=RegionName(""), epoch="", version=0)
        self._bare = self._whole = b""
        self._sequence = 0
        self._frame = b""
        self._changed = asyncio.Event()
        self._published = asyncio.Condition()

    def touch(self) -> None:
        self._changed.set()

    def snapshot(self) -> RegionStatus:
        """The state now, under the number of the last frame."""
        return msgspec.structs.replace(self._build(), sequence=self._sequence)

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            self._changed.clear()
            self._sequence += 1
            self._frame = encode_frame(self.snapshot())
            self._encode_prefixes()
            async with self._published:
                self._published.notify_all()
            await asyncio.sleep(MIN_INTERVAL_S)
            try:
                async with asyncio.timeout(MAX_INTERVAL_S - MIN_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def next_frame(self, seen: int) -> tuple[int, bytes]:
        """The newest frame, once there is one after number `seen`; a slow reader skips some."""
        async with self._published:
            await self._published.wait_for(lambda: self._sequence > seen and self._frame != b"")
        return self._sequence, self._frame

    def prefix_frame(self, seen: PrefixesSeen) -> tuple[PrefixesSeen, bytes]:
        """What a stream that has told `seen` is to tell now: nothing, what changed, or all of it
        with its filter when that is a new one."""
        told = self._told
        now = PrefixesSeen(told.version, told.base)
        if now == seen:
            return seen, b""
        return now, self._bare if now.base == seen.base else self._whole

    def _encode_prefixes(self) -> None:
        told, held = self._prefixes.publication(time.monotonic())
        if told.version == self._told.version:
            return
        self._told = told
        self._bare = encode_frame(told)
        self._whole = encode_frame(msgspec.structs.replace(told, filter=held))


def region_status(
    *,
    region: str,
    epoch: str,
    view: ClusterView,
    members: Iterable[Member],
    nodes: Iterable[Node],
    models: tuple[ModelStatus, ...],
    queue_s: float,
    queued: int,
    active: int,
    draining: bool,
    hits: Hits,
    release: str,
    orders: Orders = NO_ORDERS,
    wanted: tuple[Wanted, ...] = (),
    running: Collection[str] | None = None,
) -> RegionStatus:
    """All of it in one frame; `sequence` is the publisher's to set. `nodes`: as the topology has
    them; `running`: see `absent`."""
    known = tuple(members)
    nodes = tuple(nodes)
    pools = {node.name: node.pool or "" for node in nodes}
    return RegionStatus(
        region=RegionName(region),
        epoch=epoch,
        sequence=0,
        models=models,
        nodes=(
            *(rested(node_status(one, pools.get(one.session.name, "")), orders) for one in known),
            *(rested(one, orders) for one in absent(known, nodes, running)),
        ),
        prefill_work_s=prefill_work_s(view),
        decode_work_s=decode_work_s(view),
        queue_s=queue_s,
        queued=queued,
        active=active,
        kv_used=fullest_pool(known),
        draining=draining or orders.resting,
        release=release,
        more=RegionMore(prompts=hits.told, weight=orders.weight, wanted=wanted),
    )
