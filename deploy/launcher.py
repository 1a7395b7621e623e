"""A topology as real processes on this machine: one per edge, router and node.

`run_world` is a context manager: inside it the world is up, after it nothing of it is left. All
processes start at once; each is said to be up when it is, with its time and resident memory. One
that ends while the world comes up is a failure with the last lines of its log; one that ends later
is started again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from core.config import Topology, World, load
from core.errors import ConfigError
from deploy import toml_write
from deploy.fleet import Fleet, resident_mb, running
from deploy.inside import client as client_of
from deploy.ports import resolve
from deploy.process import PAUSES, Pauses, Process, describe_exit
from deploy.ready import Probe, edge_urls, router_urls
from deploy.rollout.control import serving
from deploy.rollout.desk import Desk
from deploy.rollout.fit import self_contained
from deploy.rollout.undoing import undo
from deploy.scaling import scaled
from deploy.specs import Makings
from deploy.state import (
    FOLDER,
    Say,
    StateFolder,
    claim,
    claim_any,
    folder_name,
    found_from,
)
from deploy.worker.shelves import fill_empty

START_S = 120.0
"""A world that is not ready after this has failed."""
POLL_S = 0.1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LaunchFailed(ConfigError):
    """The world did not come up; the message tells who and shows the end of its log."""


class LocalWorld:
    """A running world. `world` holds the resolved topology and the state folder."""

    def __init__(self, world: World, processes: Fleet, logs: Path) -> None:
        self.world = world
        self.logs = logs
        self.edges = edge_urls(world.topology)
        self.routers = router_urls(world.topology)
        self.processes = processes

    def took(self, world: World) -> None:
        """It has changed."""
        self.world = world
        self.edges = edge_urls(world.topology)
        self.routers = router_urls(world.topology)

    def pid(self, name: str) -> int:
        """The present process of an edge, region (its router) or node."""
        return self.processes[name].pid

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[name].kill(number)

    def resident_mb(self, name: str) -> int:
        """Resident memory of a process and what it started (a node's ranks)."""
        return resident_mb(self.pid(name))

    def resident_mb_total(self) -> int:
        return sum(self.resident_mb(name) for name in self.processes)


@contextmanager
def run_world(
    topology: Path,
    *,
    say: Say,
    state: Path | None = None,
    root: Path = FOLDER,
    restart: bool = True,
    start_s: float = START_S,
    pauses: Pauses = PAUSES,
    draw: Say = lambda _: None,
) -> Iterator[LocalWorld]:
    """The world of a topology file, up and watched. Raises ConfigError, LaunchFailed.

    `draw` is told who is still waited for, many times a second. `state` is a state folder of one's
    own; without it one under `root` is chosen by the world's name. With `restart` False a process
    that ends stays down.
    """
    described = load(topology, state=state or root)
    marks = _marks(described.topology)
    with ExitStack() as stack:
        folder = stack.enter_context(
            claim(state, marks)
            if state
            else claim_any(root, folder_name(described.topology.name), say, marks)
        )
        undo(folder.path, say)
        resolved = resolve(self_contained(described), stack)
        for move in resolved.moves:
            say(str(move))
        path = folder.run / "topology.toml"
        path.write_text(toml_write.dump(resolved.topology), encoding="utf-8")
        world = load(path.resolve(), state=folder.path.resolve())
        for which in ("region", "fleet"):
            world.secret(which)  # made here once rather than by many processes at the same moment
        fill_empty(world, say)
        makings = Makings(folder.logs.resolve(), resolved.listeners, resolved.claims)
        processes = stack.enter_context(running(makings.all(world), say=say, pauses=pauses))
        _wait_until_ready(world, processes, say, draw, start_s)
        for process in processes.values():
            process.revive = restart
        local = LocalWorld(world, processes, folder.logs)
        control = stack.enter_context(
            _control(described.topology, local, makings, folder, say, revive=restart)
        )
        folder.record(local.edges, local.routers, path, control)
        stack.enter_context(found_from(root, folder.path, say))
        yield local


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does. For the main thread. SIGINT is set too: a
    shell that starts a program with `&` has it ignored."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _control(
    asked: Topology,
    local: LocalWorld,
    makings: Makings,
    folder: StateFolder,
    say: Say,
    *,
    revive: bool,
) -> Iterator[Path]:
    """Where the command line asks for changes of the running world. Meanwhile its nodes are as many
    as its routers want."""

    def recorded(topology: Path) -> None:
        local.took(desk.world)
        folder.record(local.edges, local.routers, topology, where)

    desk = Desk(
        asked=asked,
        world=local.world,
        fleet=local.processes,
        makings=makings,
        recorded=recorded,
    )
    with (
        serving(folder.path / "control.sock", desk.serve) as where,
        scaled(lambda: desk.followed, local.processes, desk.spec, say=say, revive=revive),
    ):
        try:
            yield where
        finally:
            desk.close()


def _marks(topology: Topology) -> list[str]:
    """Files of a state folder that this topology names and that may be there before a first `up`:
    keys, certificates, and secrets shared with other machines."""
    secrets = (topology.secrets.region, topology.secrets.fleet)
    files = (one.removeprefix("file:") for one in secrets if one.startswith("file:"))
    shown = (f for edge in topology.edges if (t := edge.tls) for f in (t.certificate, t.key))
    named = (topology.access.keys, topology.tls.folder, *files, *shown)
    return [part for one in named for part in Path(one).parts[:1]]


def _wait_until_ready(
    world: World, processes: Mapping[str, Process], say: Say, draw: Say, start_s: float
) -> None:
    started = time.monotonic()
    with client_of(world) as client:
        probe = Probe(client, world.topology)
        while True:
            for name in probe.poll():
                process = processes[name]
                spent = time.monotonic() - started
                memory = resident_mb(process.pid)
                say(f"  {spent:5.1f} s  {process.spec.kind:<6}  {name:<14} {memory:>5} MB")
            draw(f"  {time.monotonic() - started:5.1f} s  waiting for {_names(probe.missing)}")
            for process in processes.values():
                if process.exit_code is not None:
                    raise LaunchFailed(_obituary(process))
            if probe.ready():
                return
            if time.monotonic() - started > start_s:
                late = probe.missing
                raise LaunchFailed(
                    f"not ready after {start_s:.0f} s: {_names(late)}"
                    + "".join(f"\n{_log_end(processes[name])}" for name in late[:1])
                )
            time.sleep(POLL_S)


def _names(missing: Sequence[str]) -> str:
    return ", ".join(missing) or "a region's model"


def _obituary(process: Process) -> str:
    code = process.exit_code if process.exit_code is not None else 0
    return (
        f"{process.spec.kind} {process.spec.name} ended while starting, {describe_exit(code)}"
        + (f"\n{_log_end(process)}")
    )


def _log_end(process: Process) -> str:
    lines = process.last_lines()
    shown = "".join(f"    {line}\n" for line in lines) or "    (nothing)\n"
    return f"  the end of {process.spec.log}:\n{shown}".rstrip()
