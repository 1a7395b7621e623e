"""The steps of a rollout, taken on this machine's processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core.config import World
from core.errors import ConfigError
from deploy.fleet import Fleet, WorldEnds, descendants
from deploy.process import Process, describe_exit
from deploy.releases import Release
from deploy.rollout.asking import Asking
from deploy.rollout.attending import Attending, Patience
from deploy.rollout.steps import (
    Beside,
    Empty,
    Heard,
    Hosting,
    Idle,
    Kind,
    Leave,
    Ready,
    Replace,
    Reread,
    Rest,
    Shelve,
    Start,
    Step,
    Stop,
    Watch,
    Weigh,
)
from deploy.specs import Makings
from deploy.worker.shelves import clear, fill

STOP_S = 15.0
"""What is idle ends at once; a router gives what it still has 10 s."""


@dataclass(frozen=True, slots=True)
class Making:
    """What a process is made from."""

    world: World
    release: Release


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
        asking: Asking,
        attending: Attending,
        patience: Patience,
        say: Callable[[str], None],
    ) -> None:
        self._fleet = fleet
        self._makings = makings
        self._made = made
        self._before = dict(made)
        self._after = after
        self._asking = asking
        self._attending = attending
        self._patience = patience
        self._say = say
        self._stopped: set[str] = set()

    def take(self, step: Step) -> None:
        match step:
            case Rest() | Idle() | Empty() | Hosting() | Heard() | Weigh() | Watch():
                self._attending.take(step)
            case Replace(names, back):
                self._replace(names, back=back)
            case Reread():
                self._reread(step)
            case Start(name, later):
                self._begin(name, later=later)
            case Stop(name):
                self._stop(name)
            case Beside(edge, back):
                self._beside(edge, back=back)
            case Leave(edge):
                self._leave(edge)
            case Shelve(edge, workers, back):
                self._shelve(edge, workers, back=back)
            case Ready(names, but):
                self._ready(names, but)

    def _reread(self, step: Reread) -> None:
        router = step.router
        making = (self._before if step.back else self._after)[router]
        if self._made[router] is not making:
            # First: one that does not answer in time may have taken it all the same, and is to be
            # told of the way back.
            self._made[router] = making
            self._fleet[router].spec = self._makings.spec(making.world, router, making.release)
            self._asking.tell(router, making.world.path, mute=step.mute)

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

    def _begin(self, name: str, *, later: bool) -> None:
        """One that is new, or that was stopped for good and comes back after all."""
        back = name in self._before
        making = (self._before if back else self._after)[name]
        if later or (back and name not in self._stopped):
            self._made[name] = making
        else:
            self._start(name, making)

    def _stop(self, name: str) -> None:
        self._fleet.reserve(name)  # first: whoever follows its model's numbers starts it no more
        self._made.pop(name, None)
        if name in self._fleet:
            self._stopped.add(name)
            self._fleet.stop([name], STOP_S)
            self._fleet.drop(name)

    def _leave(self, edge: str) -> None:
        self._makings.disown(edge)
        self._made.pop(edge, None)
        process = self._fleet.part(edge)
        process.retire()
        try:
            self._asking.until(
                lambda: process.exit_code is not None,
                self._patience.idle_s,
                else_=lambda: f"edge {edge} still answers",
            )
        except WorldEnds:
            raise
        except ConfigError as error:
            self._say(f"  {error}: what it has is broken off")
            self._fleet.break_off(process)

    def _shelve(self, edge: str, workers: Sequence[str], *, back: bool) -> None:
        world = self._after[edge].world
        if back:
            clear(world.state, edge)
            return
        others = [one.name for one in world.topology.edges if one.admin is not None]
        fill(world.state, edge, others, workers, self._say)

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
                    described.url, descendants(process.pid), described.workers
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

    def _ready(self, names: Sequence[str], but: Sequence[str]) -> None:
        waited_for = [name for name in names if name in self._fleet]

        def ready() -> bool:
            waited_for[:] = [name for name in waited_for if not self._is_ready(name, but)]
            return not waited_for

        self._asking.until(
            ready, self._patience.ready_s, else_=lambda: f"{', '.join(waited_for)} is not ready"
        )
        for name in names:
            if name in self._fleet:
                self._fleet[name].revive = True

    def _is_ready(self, name: str, but: Sequence[str]) -> bool:
        process = self._fleet[name]
        self._lives(process)
        topology = self._made[name].world.topology
        if process.spec.kind == "edge":
            return self._asking.hears(topology.edge(name).url)
        if process.spec.kind == "node":
            doors = self._asking.doors(Kind.NODE, name, but)
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
        lines = [line for line in process.last_lines(60) if "skerry.request" not in line]
        last = "\n".join(f"    {line}" for line in lines[-4:]) or "    (nothing)"
        raise ConfigError(
            f"{process.spec.kind} {process.spec.name} ended while starting, "
            f"{describe_exit(process.exit_code)}\n  the end of {process.spec.log}:\n{last}"
        )
