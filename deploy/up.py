"""`skerry up`: a world on this machine until Ctrl-C."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx

from core.config import Topology, load
from core.errors import ConfigError
from deploy.access import needs_key
from deploy.hints import QUESTION, curl, indented, python
from deploy.launcher import LocalWorld, ended_by_signals, run_world
from deploy.models import check_plans
from deploy.screen import Screen
from deploy.sizes import EDGE_PROCESS_MB, NODE_PROCESS_MB, ROUTER_PROCESS_MB
from deploy.state import FOLDER, first_edge
from deploy.status import wait_and_draw


def up(topology: Path, state: Path | None) -> None:
    """Returns after Ctrl-C, SIGTERM or SIGHUP, with everything stopped. Raises ConfigError."""
    described = load(topology, state=FOLDER)
    check_plans(described)
    screen = Screen(sys.stdout)
    screen.say(f"Starting the world of {topology}; nodes load their models")
    screen.say(expected(described.topology))
    started = False
    try:
        with (
            ended_by_signals(),
            run_world(topology, say=screen.say, draw=screen.draw, state=state) as world,
        ):
            started = True
            screen.draw("")
            screen.say(welcome(world, usual_edge=first_edge()))
            with httpx.Client(trust_env=False) as client:
                wait_and_draw(client, world.routers, screen, period_s=1.0)
    except KeyboardInterrupt:
        if not started:
            screen.draw("")
            raise ConfigError(
                "stopped before the world was ready; nothing is left running"
            ) from None
        screen.say("\nstopped; nothing is left running")


def expected(topology: Topology) -> str:
    """How many processes, and what memory they will take between them."""
    nodes = sum(len(region.nodes) for region in topology.regions)
    edges = sum(edge.workers for edge in topology.edges)
    routers = len(topology.regions)
    megabytes = edges * EDGE_PROCESS_MB + routers * ROUTER_PROCESS_MB + nodes * NODE_PROCESS_MB
    return (
        f"  {routers} routers, {nodes} nodes, {edges} edge processes: "
        f"about {megabytes / 1000:.1f} GB of memory with the bundled model"
    )


def welcome(world: LocalWorld, *, usual_edge: str) -> str:
    """What one can do now. `usual_edge` is where `skerry chat` goes when it is told nothing."""
    topology = world.world.topology
    first, model = next(iter(world.edges.values())), _model(topology)
    lines = [f"\nReady, {world.resident_mb_total()} MB in all. Logs: {world.logs}"]
    for edge in topology.edges:
        place = f" ({edge.place})" if edge.place else ""
        lines.append(f"  {world.edges[edge.name]}  edge {edge.name}{place}")
    elsewhere = "" if usual_edge == first else f" --edge {first}"
    key = needs_key(world.world)
    if key:
        lines.append("\nCallers need a key: export SKERRY_KEY=$(skerry keys create --tenant NAME)")
    lines += ["\nAsk it:", indented(curl(first, model, key=key))]
    lines.append(indented(python(first, model, key=key)))
    lines += [f"  .venv/bin/skerry chat{elsewhere} '{QUESTION}'\n", "Ctrl-C stops everything."]
    return "\n".join(lines)


def _model(topology: Topology) -> str:
    """A short name for the lines to copy."""
    name, model = next(iter(topology.models.items()))
    return min((name, *model.aliases), key=len)
