"""The scaler brought to life in a router: looked at each second, and at once when a request waits
for a model that is cold. Whoever starts nodes follows what is published; a router starts none."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from core.config import Region
from core.config_scale import at_first, first_nodes
from core.metrics import RouterMetrics
from core.status import Wanted
from core.types import ModelName, Role
from regional.cluster import UNMEASURED_TOKENS_PER_S, Cluster, ClusterView, NodeView
from regional.demand import Demand
from regional.dispatch import Dispatcher
from regional.placement import TYPICAL_ANSWER_TOKENS
from regional.places import Places
from regional.scaler import Load, Standing, decide

LOOK_S = 1.0
CLOSELY_S = 0.2
"""Between looks while a cold model's node starts: what that takes is measured."""
SETTLE_S = 5.0
"""After the router's start, in which the nodes that are up join it."""
ASSUMED_START_S = 5.0
"""Until one has been seen."""
LEAST_START_S = 0.5
"""Of a start that takes longer than the last one did."""
TURNED_AWAY_S = 1.0
"""A request that would not wait counts for so long as one that does."""


@dataclass(slots=True)
class _Start:
    """Of a model's first node. `took_s`: how long the last one took; `since`: the one under way."""

    took_s: float = ASSUMED_START_S
    since: float | None = None

    def left_s(self, now: float) -> float:
        passed = 0.0 if self.since is None else now - self.since
        return max(LEAST_START_S, self.took_s - passed)


class Scaling:
    """The wanted numbers of one region. `changed` is called when one moved."""

    def __init__(
        self,
        region: Region,
        *,
        cluster: Cluster,
        dispatcher: Dispatcher,
        demand: Demand,
        metrics: RouterMetrics,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._region = region
        self._cluster = cluster
        self._dispatcher = dispatcher
        self._demand = demand
        self._metrics = metrics
        self._changed = changed
        self._clock = clock
        self._began = clock()
        self._there = _there(region)
        self._standing: dict[tuple[ModelName, Role], Standing] = {}
        self._starts = {ModelName(model): _Start() for model in region.scale}
        self._asked: set[ModelName] = set()
        self._asked_at: dict[ModelName, float] = {}
        self._places = Places(region)
        self._told: list[Wanted] = []
        self._poked = asyncio.Event()

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """Of what has been decided on; for the rest, whatever runs is right."""
        return tuple(
            self._published(model, role, one) for (model, role), one in self._standing.items()
        )

    @property
    def running(self) -> frozenset[str]:
        """The nodes that should run. Of those in a pool only what always does: who else has a place
        is for whoever starts them to say."""
        always = at_first(self._region)
        wanted = {**always}
        wanted.update({key: one.wanted for key, one in self._standing.items()})
        resting, here = self._cluster.resting, {one.session.name for one in self._cluster.members()}
        nodes = first_nodes(self._region, wanted, resting, here)
        return frozenset(
            {node.name for node in nodes if node.pool is None}
            | {one.name for one in first_nodes(self._region, always, resting, here) if one.pool}
        )

    def start_s(self, model: ModelName) -> float | None:
        """How long until a cold model has a node; None for one whose nodes are not started here."""
        start = self._starts.get(model)
        if start is None:
            return None
        return start.left_s(self._clock()) + self._places.wait_s(model, self._cluster)

    def cold(self, model: ModelName) -> None:
        """A request waits for it, or would not."""
        self._asked.add(model)
        self._asked_at[model] = self._clock()
        self._poked.set()

    def take(self, region: Region) -> None:
        """Go on with what a changed topology says; what is known of what stays is kept."""
        self._region, there = region, _there(region)
        self._places = Places(region)
        for model, role in self._there.keys() - there.keys():
            if self._standing.pop((model, role), None) is not None:
                self._metrics.wanted.remove(model, role.value)
        self._there = there
        models = [ModelName(model) for model in region.scale]
        self._starts = {model: self._starts.get(model) or _Start() for model in models}
        self._poked.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._poked.clear()
            self.look()
            starting = any(start.since is not None for start in self._starts.values())
            pause_s = CLOSELY_S if starting else LOOK_S
            try:
                async with asyncio.timeout(pause_s if self._there else None):
                    await self._poked.wait()
            except TimeoutError:
                continue

    def look(self) -> None:
        """Decide anew."""
        now, view, before = self._clock(), self._cluster.view(), self._told
        for (model, role), there in self._there.items():
            load = self._load(view, model, role, there)
            known = self._standing.get((model, role))
            if known is None and not load.waiting and now - self._began < SETTLE_S:
                continue
            one = decide(load, self._region.scale[model], known, now)
            self._standing[model, role] = one
            self._metrics.wanted.labels(model, role.value).set(one.wanted)
        self._asked.clear()
        for model, start in self._starts.items():
            self._time(start, model, view, now)
        self._told = [_lasting(one) for one in self.wanted]
        if self._told != before:
            self._changed()

    def _published(self, model: ModelName, role: Role, one: Standing) -> Wanted:
        waiting, _ = self._dispatcher.waiting_for(model)
        turned_away = self._clock() - self._asked_at.get(model, -math.inf) < TURNED_AWAY_S
        return Wanted(
            model=model,
            role=role,
            nodes=one.wanted,
            why=one.why,
            waiting=max(waiting, int(turned_away)),
            waiting_s=self._dispatcher.waiting_s(model),
            in_use=self._demand.idle_s(model) == 0.0,
            no_place=self._places.full(model, self._cluster),
        )

    def _load(self, view: ClusterView, model: ModelName, role: Role, there: int) -> Load:
        nodes = [
            node
            for node in view.nodes
            if node.role is role and not node.draining and node.offer(model)
        ]
        waiting, tokens = self._dispatcher.waiting_for(model)
        decodes = role is not Role.PREFILL
        reads = role is not Role.DECODE
        queue_s = max(
            _to_read_s(nodes, tokens) if reads and nodes else 0.0,
            _for_slot_s(nodes, waiting) if decodes and nodes else 0.0,
        )
        return Load(
            there=there,
            up=len({node.name for node in nodes}),
            waiting=max(waiting, int(model in self._asked)),
            idle_s=self._demand.idle_s(model),
            queue_s=queue_s,
            first_token_s=self._demand.first_token_s(model) if reads else 0.0,
            sequences=sum(node.sequences for node in nodes) if decodes else 0,
            slots=sum(node.max_sequences for node in nodes) if decodes else 0,
        )

    def _time(self, start: _Start, model: ModelName, view: ClusterView, now: float) -> None:
        """Measure how long a cold model's first node takes."""
        if any(view.answering(model)):
            if start.since is not None:
                start.took_s, start.since = now - start.since, None
        elif not self._wants_answers(model) or self._places.full(model, self._cluster):
            start.since = None
        elif start.since is None:
            start.since = now

    def _wants_answers(self, model: ModelName) -> bool:
        return any(
            one.wanted
            for (of, role), one in self._standing.items()
            if of == model and role is not Role.PREFILL
        )


def _lasting(one: Wanted) -> Wanted:
    """Without what changes all the time: that is no news."""
    waiting = int(one.waiting > 0)
    return msgspec.structs.replace(one, waiting=waiting, waiting_s=0.0, in_use=False)


def _there(region: Region) -> Mapping[tuple[ModelName, Role], int]:
    return Counter(
        (ModelName(node.model), node.role) for node in region.nodes if node.model in region.scale
    )


def _to_read_s(nodes: list[NodeView], tokens: int) -> float:
    rate = sum(node.prefill_tokens_per_s for node in nodes) or UNMEASURED_TOKENS_PER_S
    return (tokens + sum(node.prefill_tokens for node in nodes)) / rate


def _for_slot_s(nodes: list[NodeView], waiting: int) -> float:
    """0 while one is free."""
    if any(node.sequences < node.max_sequences for node in nodes):
        return 0.0
    rate = sum(node.decode_tokens_per_s * node.max_sequences for node in nodes)
    return (waiting + 1) * TYPICAL_ANSWER_TOKENS / rate
