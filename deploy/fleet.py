"""The processes of a world by name, and those on their way out: started together, replaced one by
one while it runs, ended together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import psutil

from core.errors import ConfigError
from deploy.process import PAUSES, Pauses, Process, Spec

EDGE_GRACE_S = 6.0
"""Answers may go on for so long once the world is to end."""
GRACE_S = 3.0
"""The same for routers and nodes, which have nothing to do once the edges are gone."""
TELL_S = 1.5
"""Then routers break off what runs, and edges have this long to tell their callers."""
HURRY_S = 1.5
"""From the second SIGTERM, which means now, to SIGKILL."""
APART_S = 0.2
"""Between two signals that are to be seen as two."""


class WorldEnds(ConfigError):
    """Nothing is started or waited for any more."""

    def __init__(self) -> None:
        super().__init__("the world is being stopped")


class Fleet(Mapping[str, Process]):
    """What runs now, by name. Replacing is done by one thread, the end by another: after `close`
    nothing is started any more."""

    def __init__(self, *, link: int, say: Callable[[str], None], pauses: Pauses) -> None:
        self.reserved: set[str] = set()
        """Names that a rollout replaces now: nobody else starts or stops them."""
        self._link = link
        self._say = say
        self._pauses = pauses
        self._running: dict[str, Process] = {}
        self._leaving: list[Process] = []
        self._lock = threading.Lock()
        self._closed = False

    def __getitem__(self, name: str) -> Process:
        return self._running[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._running))

    def __len__(self) -> int:
        return len(self._running)

    def reserve(self, name: str) -> None:
        """Who was just about to start it has done so, or does not any more."""
        with self._lock:
            self.reserved.add(name)

    def start(self, spec: Spec, *, append: bool = False, free: bool = False) -> Process:
        """`free`: only one that is not reserved, else ConfigError. Raises WorldEnds."""
        with self._lock:
            if free and spec.name in self.reserved:
                raise ConfigError(f"a rollout has {spec.name} in hand")
            self._running[spec.name] = process = self._new(spec, append)
        return process

    def start_beside(self, spec: Spec) -> Process:
        """A second process of a name, which stays `leaving` unless it is `put` in the place of the
        first. Raises WorldEnds."""
        with self._lock:
            process = self._new(spec, append=True)
            self._leaving.append(process)
        return process

    def put(self, process: Process) -> Process:
        """In the place of the first, which is returned and is to be asked to end."""
        with self._lock:
            first = self._running[process.spec.name]
            self._running[process.spec.name] = process
            self._leaving = [one for one in self._leaving if one is not process] + [first]
        return first

    def part(self, name: str) -> Process:
        """It has the name no longer, and is to be asked to end; nothing starts it again."""
        with self._lock:
            process = self._running.pop(name)
            self._leaving.append(process)
        return process

    def stop(self, names: Collection[str], grace_s: float) -> None:
        """All at once, and wait. Who is late is ended."""
        processes = [self._running[name] for name in names if name in self._running]
        asked(processes, grace_s)
        deadline = time.monotonic() + HURRY_S
        for process in processes:
            process.end(deadline)

    def break_off(self, process: Process) -> None:
        """It was asked to end with its last answer, and is to end now."""
        asked([process], APART_S)
        asked([process], TELL_S)
        process.end(time.monotonic())

    def drop(self, name: str) -> None:
        """It has ended and is not to be started again."""
        with self._lock:
            self._running.pop(name, None)

    def close(self) -> list[Process]:
        """Everything that may still run; nothing is started from now on."""
        with self._lock:
            self._closed = True
            return [*self._running.values(), *self._leaving]

    def _new(self, spec: Spec, append: bool) -> Process:
        if self._closed:
            raise WorldEnds
        self._leaving = [one for one in self._leaving if one.exit_code is None]
        return Process(spec, link=self._link, say=self._say, pauses=self._pauses, append=append)


@contextmanager
def running(
    specs: Sequence[Spec], *, say: Callable[[str], None], pauses: Pauses = PAUSES
) -> Iterator[Fleet]:
    """All of `specs`, started; ended on the way out, whatever the way."""
    link, lifeline = os.pipe()
    fleet = Fleet(link=link, say=say, pauses=pauses)
    try:
        for spec in specs:
            fleet.start(spec)
        yield fleet
    finally:
        _end_all(fleet.close())
        os.close(link)
        os.close(lifeline)


def _end_all(processes: list[Process]) -> None:
    """Edges first: what they answer needs the others. Ctrl-C meanwhile ends all graces at once."""
    hurried = False
    while True:
        try:
            if not hurried:
                _end_in_turn(processes)
            for process in processes:
                process.ask_to_end()
            deadline = time.monotonic() + HURRY_S
            for process in processes:
                process.end(deadline)
        except KeyboardInterrupt:
            hurried = True
        else:
            return


def _end_in_turn(processes: list[Process]) -> None:
    """Who is late afterwards is to be asked once more, and was asked before."""
    edges = [process for process in processes if process.spec.kind == "edge"]
    others = [process for process in processes if process.spec.kind != "edge"]
    late = asked(edges, EDGE_GRACE_S)
    if asked(others, APART_S if late else GRACE_S) and late:
        asked(others, 0.0)  # now: a router tells its edges so, and they tell their callers
        deadline = time.monotonic() + TELL_S
        for process in late:
            process.ended_by(deadline)


def asked(processes: list[Process], grace_s: float) -> list[Process]:
    """Those that did not end within the grace."""
    for process in processes:
        process.ask_to_end()
    deadline = time.monotonic() + grace_s
    return [process for process in processes if not process.ended_by(deadline)]


def descendants(pid: int) -> set[int]:
    """Processes that it started, and those that they did."""
    with suppress(psutil.NoSuchProcess):
        return {one.pid for one in psutil.Process(pid).children(recursive=True)}
    return set()


def offspring(pid: int) -> list[psutil.Process]:
    """The same, to be looked at again when it has gone."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        found += psutil.Process(pid).children(recursive=True)
    return found


def runs_on(processes: Iterable[psutil.Process]) -> bool:
    """Whether any of them is still there, with what it holds."""
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def resident_mb(pid: int) -> int:
    total = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
    return total // 1_000_000
