"""The steps of a rollout that are the same wherever processes run: orders to them over HTTP, and
waiting for what they say of themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from core.batches import QueueLeft
from core.config import World
from core.errors import ConfigError
from core.orders import OrderAsk
from deploy.fleet import WorldEnds
from deploy.orders import Part, give_by
from deploy.rollout import judge
from deploy.rollout.asking import Asking
from deploy.rollout.steps import Empty, Heard, Hosting, Idle, Kind, Rest, Watch, Weigh
from deploy.worker.shelves import rows_of, shelved, told
from edge.workers.admin_pages import Rows

WATCH_EVERY_S = 0.5
HEARD_S = 0.5
"""Within which every edge has heard of a drain."""
UNHEARD_S = 15.0
"""A router that says nothing for so long is not only slow."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: `idle_s` for what runs, `ready_s` for what starts."""

    idle_s: float = 600.0
    ready_s: float = 120.0


class Attending:
    """`client` reaches the processes of `world`. `pause`: see `Asking`."""

    def __init__(
        self,
        *,
        client: httpx.Client,
        world: World,
        asking: Asking,
        patience: Patience,
        pause: Callable[[float], bool],
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._world = world
        self._asking = asking
        self._patience = patience
        self._pause = pause
        self._say = say
        self._base = judge.read(asking.metrics())

    def take(self, step: Rest | Idle | Empty | Hosting | Heard | Weigh | Watch) -> None:
        """Returns when it is done. Raises ConfigError."""
        match step:
            case Rest(Kind.NODE as kind, name, resting, but=but):
                self.order(kind, name, OrderAsk(nodes={name: resting}), but)
            case Rest(kind, name, resting, leaving, but):
                self.order(kind, name, OrderAsk(resting=resting, leaving=leaving), but)
            case Idle():
                self._idle(step)
            case Empty(region, but):
                self._empty(region, but)
            case Hosting(edge):
                self._hosting(edge)
            case Heard(region):
                self._asking.until(
                    lambda: self._asking.all_hear(region),
                    self._patience.ready_s,
                    else_=lambda: f"not every edge hears region {region}",
                )
            case Weigh(region, weight, but):
                self.order(Kind.REGION, region, OrderAsk(weight=weight), but)
            case Watch(region, seconds):
                self._watch(region, seconds)

    def order(self, kind: Kind, name: str, ask: OrderAsk, but: Sequence[str] = ()) -> None:
        """To all routers that know of it. Raises ConfigError."""
        doors = tuple(self._asking.doors(kind, name, but).values())
        give_by(self._client, self._world, Part(str(kind), name, doors), ask)

    def _idle(self, step: Idle) -> None:
        """Edges hear of a drain, and routers of what a node has, a little later."""
        kind, name = step.kind, step.name
        heartbeat_s = self._world.topology.limits.heartbeat_s
        try:
            self._calm(
                f"{kind} {name}",
                lambda: self._asking.under_way(kind, name, step.but),
                "under way",
                2.5 * heartbeat_s if kind is Kind.NODE else HEARD_S,
            )
        except ConfigError as error:
            if step.must or isinstance(error, WorldEnds):
                raise
            self._say(f"  {error}: what it has is broken off")

    def _empty(self, region: str, but: Sequence[str]) -> None:
        left = QueueLeft()

        def queued() -> int:
            nonlocal left
            left = self._asking.queue_left(region, but)
            return left.waiting + left.owed

        self._calm(f"region {region}", queued, "queued or not written down", HEARD_S)
        if left.kept:
            self._say(f"  kept answers of batches that cannot be asked for without it: {left.kept}")

    def _hosting(self, edge: str) -> None:
        """Nobody goes back for a Worker: without it the edge is as useful as it would be new."""
        described = self._world.topology.edge(edge)
        rows: Rows | None = None

        def answers() -> bool:
            nonlocal rows
            rows = rows_of(self._world, described)
            return rows is not None

        try:
            self._asking.until(
                answers,
                self._patience.ready_s,
                else_=lambda: f"edge {edge} has no Workers yet: their host does not answer",
            )
        except WorldEnds:
            raise
        except ConfigError as error:
            self._say(f"  {error}")
        if rows is not None:
            others = (one for one in self._world.topology.edges if one.name != edge)
            for line in told(shelved(self._world.state, others), rows):
                self._say(f"  {line}")

    def _calm(self, who: str, left: Callable[[], int], what: str, settled_s: float) -> None:
        """Wait until `who` has nothing left, for a moment, not at one moment. Who does not answer
        at once may be slow, or be started again. Raises ConfigError."""
        since: float | None = None
        unheard: float | None = None
        last, why = 0, ""

        def calm() -> bool:
            nonlocal since, unheard, last, why
            try:
                now_left = left()
            except ConfigError as error:
                now = time.monotonic()
                since, why = None, str(error)
                unheard = now if unheard is None else unheard
                if now - unheard >= UNHEARD_S:
                    raise
                return False
            unheard, why = None, ""
            if now_left:
                since = None
                if now_left != last:
                    self._say(f"  {now_left} {what}")
                last = now_left
                return False
            now = time.monotonic()
            since = now if since is None else since
            return now - since >= settled_s

        self._asking.until(
            calm,
            self._patience.idle_s,
            else_=lambda: why if why and not last else f"{who} still has {last} {what}",
        )

    def _watch(self, region: str, seconds: float) -> None:
        """Raises ConfigError as soon as the region is worse than a bound allows."""
        start = judge.read(self._asking.metrics())
        none = judge.Counts()
        before = self._base.get(region, none)
        end = time.monotonic() + seconds
        while True:
            over = time.monotonic() >= end
            now = judge.read(self._asking.metrics())
            since = {name: counts.since(start.get(name, none)) for name, counts in now.items()}
            came = since.get(region, none)
            why = judge.complaint(came, before, judge.others(since, region))
            if why is not None:
                raise ConfigError(f"region {region} is worse than before: {why}")
            if over:
                break
            if self._pause(WATCH_EVERY_S):
                raise WorldEnds
        few = came.answers < judge.BOUNDS.least
        note = ", too few to tell" if few else ": no worse than before"
        self._say(f"  {came.answers} answers, {came.errors} failed{note}")
