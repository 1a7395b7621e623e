"""The steps of a rollout, taken on this machine's processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core.config import World
from core.errors import ConfigError
from core.orders import OrderAsk
from deploy.fleet import Fleet, WorldEnds, descendants
from deploy.orders import Part, give
from deploy.process import Process, describe_exit
from deploy.releases import Release
from deploy.rollout import judge
from deploy.rollout.asking import Asking
from deploy.rollout.steps import (
    Beside,
    Heard,
    Idle,
    Kind,
    Ready,
    Replace,
    Rest,
    Start,
    Step,
    Stop,
    Watch,
    Weigh,
)
from deploy.specs import Makings

STOP_S = 15.0
"""What is idle ends at once; a router gives what it still has 10 s."""
WATCH_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Making:
    """What a process is made from."""

    world: World
    release: Release


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: `idle_s` for what runs, `ready_s` for what starts."""

    idle_s: float = 600.0
    ready_s: float = 120.0


class LocalStage:
    """`made` says what each process runs from, and is kept up to date; `after`, what it is to run
    from; `world` is the world to be. `pause`: see `Asking`."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        makings: Makings,
        made: dict[str, Making],
        after: Mapping[str, Making],
        world: World,
        asking: Asking,
        patience: Patience,
        pause: Callable[[float], bool],
        say: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._makings = makings
        self._made = made
        self._before = dict(made)
        self._after = after
        self._world = world
        self._asking = asking
        self._patience = patience
        self._pause = pause
        self._say = say
        self._base = judge.read(asking.metrics())

    def take(self, step: Step) -> None:
        match step:
            case Rest(kind, name, resting):
                self._give(kind, name, resting=resting)
            case Idle(kind, name, must):
                self._idle(kind, name, must=must)
            case Replace(names, back):
                self._replace(names, back=back)
            case Start(name):
                self._start(name, self._after[name])
            case Stop(name):
                self._fleet.stop([name], STOP_S)
                self._fleet.drop(name)
                self._made.pop(name, None)
            case Beside(edge, back):
                self._beside(edge, back=back)
            case Ready(names):
                self._ready(names)
            case Heard(region):
                self._asking.until(
                    lambda: self._asking.all_hear(region),
                    self._patience.ready_s,
                    else_=lambda: f"not every edge hears region {region}",
                )
            case Weigh(region, weight):
                self._order(Kind.REGION, region, OrderAsk(weight=weight))
            case Watch(region, seconds):
                self._watch(region, seconds)

    # ------------------------------------------------------------------ orders

    def _give(self, kind: Kind, name: str, *, resting: bool) -> None:
        node = kind is Kind.NODE
        self._order(
            kind, name, OrderAsk(nodes={name: resting}) if node else OrderAsk(resting=resting)
        )

    def _order(self, kind: Kind, name: str, ask: OrderAsk) -> None:
        doors = tuple(self._asking.doors(kind, name).values())
        give(self._world, Part(str(kind), name, doors), ask)

    def _idle(self, kind: Kind, name: str, *, must: bool) -> None:
        """For a moment, not at one moment: edges hear of a drain, and routers of what a node has,
        a little later."""
        heartbeat_s = self._world.topology.limits.heartbeat_s
        settled_s = 2.5 * heartbeat_s if kind is Kind.NODE else 0.5
        since: float | None = None
        last = 0

        def idle() -> bool:
            nonlocal since, last
            left = self._asking.under_way(kind, name)
            if left:
                since = None
                if left != last:
                    self._say(f"  {left} under way")
                last = left
                return False
            now = time.monotonic()
            since = now if since is None else since
            return now - since >= settled_s

        try:
            self._asking.until(
                idle, self._patience.idle_s, else_=lambda: f"{kind} {name} still has {last}"
            )
        except ConfigError as error:
            if must or isinstance(error, WorldEnds):
                raise
            self._say(f"  {error}: what it has is broken off")

    # ------------------------------------------------------------------ processes

    def _replace(self, names: Sequence[str], *, back: bool) -> None:
        makings = {name: (self._before if back else self._after)[name] for name in names}
        changed = [name for name in names if self._made[name] is not makings[name]]
        running = [name for name in changed if name in self._fleet]
        self._fleet.stop(running, STOP_S)
        for name in changed:
            self._made[name] = makings[name]
        for name in running:  # the others are off for want of work, and are made so when they start
            self._start(name, makings[name])

    def _start(self, name: str, making: Making) -> None:
        spec = self._makings.spec(making.world, name, making.release)
        self._fleet.start(spec, append=True)
        self._made[name] = making

    def _beside(self, edge: str, *, back: bool) -> None:
        making = (self._before if back else self._after)[edge]
        if self._made[edge] is making:
            return
        described = making.world.topology.edge(edge)
        host = "127.0.0.1"
        with socket.create_server((host, 0)) as own:  # whoever answers here is the new one
            spec = self._makings.spec(making.world, edge, making.release, (own,), beside=True)
            process = self._fleet.start_beside(spec)
            base = f"http://{host}:{own.getsockname()[1]}"

            def answers() -> bool:
                self._lives(process)
                if described.workers == 1:
                    return self._asking.hears(base)
                return self._asking.crew_hears(
                    f"http://{described.listen}", descendants(process.pid), described.workers
                )

            try:
                self._asking.until(
                    answers,
                    self._patience.ready_s,
                    else_=lambda: f"the new process of edge {edge} does not answer",
                )
            except ConfigError:
                process.end(time.monotonic())
                raise
        process.spec = self._makings.spec(making.world, edge, making.release)
        process.revive = True
        self._fleet.put(process).retire()
        self._made[edge] = making

    def _ready(self, names: Sequence[str]) -> None:
        waited_for = [name for name in names if name in self._fleet]

        def ready() -> bool:
            waited_for[:] = [name for name in waited_for if not self._is_ready(name)]
            return not waited_for

        self._asking.until(
            ready, self._patience.ready_s, else_=lambda: f"{', '.join(waited_for)} is not ready"
        )
        for name in names:
            if name in self._fleet:
                self._fleet[name].revive = True

    def _is_ready(self, name: str) -> bool:
        process = self._fleet[name]
        self._lives(process)
        topology = self._asking.topology
        if process.spec.kind == "edge":
            return self._asking.hears(f"http://{topology.edge(name).listen}")
        if process.spec.kind == "node":
            doors = self._asking.doors(Kind.NODE, name)
            return all(self._has_joined(url, name) for url in doors.values())
        (url,) = self._asking.doors(Kind.ROUTER, name).values()
        region, _ = topology.router(name)
        return self._asking.answers(url) and all(
            self._has_joined(url, node.name) for node in region.nodes if node.name in self._fleet
        )

    def _has_joined(self, router: str, name: str) -> bool:
        """The process that runs now, and not one before it that is not missed yet."""
        node = self._asking.node(router, name)
        return node is not None and node.alive and node.pid == self._fleet[name].pid

    def _lives(self, process: Process) -> bool:
        """Raises ConfigError when it has ended."""
        if process.exit_code is None:
            return True
        # A first process may answer meanwhile, and says so in the same file.
        lines = [line for line in process.last_lines(60) if " skerry.request " not in line]
        last = "\n".join(f"    {line}" for line in lines[-4:]) or "    (nothing)"
        raise ConfigError(
            f"{process.spec.kind} {process.spec.name} ended while starting, "
            f"{describe_exit(process.exit_code)}\n  the end of {process.spec.log}:\n{last}"
        )

    # ------------------------------------------------------------------ watching

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
