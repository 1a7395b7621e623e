"""`skerry up`: a world on this machine until Ctrl-C."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx

from core.config import Topology
from core.errors import ConfigError
from deploy.hints import QUESTION, curl, indented, python
from deploy.launcher import LocalWorld, ended_by_signals, run_world
from deploy.status import wait_and_draw


def up(topology: Path, state: Path | None) -> None:
    """Returns after Ctrl-C, SIGTERM or SIGHUP, with everything stopped. Raises ConfigError."""
    live = sys.stdout.isatty()
    started = False
    try:
        with ended_by_signals(), run_world(topology, say=_say, state=state) as world:
            started = True
            _welcome(world)
            with httpx.Client(trust_env=False) as client:
                wait_and_draw(client, world.routers, live=live, period_s=1.0)
    except KeyboardInterrupt:
        if not started:
            raise ConfigError(
                "stopped before the world was ready; nothing is left running"
            ) from None
        print("\nstopped; nothing is left running", flush=True)


def _say(line: str) -> None:
    """Above the live line, when there is one."""
    print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, flush=True)


def _welcome(world: LocalWorld) -> None:
    topology = world.world.topology
    first = next(iter(world.edges.values()))
    print(f"\nReady, {world.resident_mb_total()} MB in all. Logs: {world.logs}")
    for edge in topology.edges:
        place = f" ({edge.place})" if edge.place else ""
        print(f"  {world.edges[edge.name]}  edge {edge.name}{place}")
    print("\nAsk it:\n" + indented(curl(first, _model(topology))))
    print(indented(python(first, _model(topology))))
    print(f"  .venv/bin/skerry chat '{QUESTION}'\n")
    print("Ctrl-C stops everything.", flush=True)


def _model(topology: Topology) -> str:
    """A short name for the lines to copy."""
    name, model = next(iter(topology.models.items()))
    return min((name, *model.aliases), key=len)
