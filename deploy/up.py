"""`skerry up`: a world on this machine until Ctrl-C."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from core.config import Topology, load
from core.config_scale import at_first, first_nodes
from core.config_tenants import ANONYMOUS
from core.errors import ConfigError
from core.pins import files_of
from deploy.access import needs_key
from deploy.digests import check_digests
from deploy.hints import QUESTION, curl, indented, python
from deploy.inside import client as client_of
from deploy.launcher import LocalWorld, ended_by_signals, run_world
from deploy.models import check_plans
from deploy.ready import router_view
from deploy.screen import Screen
from deploy.sizes import (
    EDGE_PROCESS_MB,
    HOST_PROCESS_MB,
    NODE_PROCESS_MB,
    RANK_PROCESS_MB,
    ROUTER_PROCESS_MB,
)
from deploy.state import FOLDER, first_edge
from deploy.status import wait_and_draw
from deploy.where import options_for

ASK_S = 0.3


def up(topology: Path, state: Path | None) -> None:
    """Returns after Ctrl-C, SIGTERM or SIGHUP, with everything stopped. Raises ConfigError."""
    described = load(topology, state=FOLDER)
    check_plans(described)
    screen = Screen(sys.stdout)
    screen.say(f"Starting the world of {topology}; nodes load their models")
    screen.say(expected(described.topology))
    check_digests(described, screen.say)
    started = False
    try:
        with (
            ended_by_signals(),
            run_world(topology, say=screen.say, draw=screen.draw, state=state) as world,
        ):
            started = True
            screen.draw("")
            where = options_for(topology, world.world.topology.name, world.world.state)
            screen.say(welcome(world, usual_edge=first_edge(), where=where))
            with client_of(world.world) as client:
                try:
                    wait_and_draw(client, world.routers, screen, period_s=1.0)
                except KeyboardInterrupt:
                    screen.say(f"\n{stopping(client, world.routers)}")
                    raise
    except KeyboardInterrupt:
        if not started:
            screen.draw("")
            raise ConfigError(
                "stopped before the world was ready; nothing is left running"
            ) from None
        screen.say("\nstopped; nothing is left running")


def expected(topology: Topology) -> str:
    """How many processes, and what memory they will take between them."""
    nodes = [node for region in topology.regions for node in first_nodes(region, at_first(region))]
    ranks = sum(node.parallel.ranks for node in nodes)
    edges = sum(edge.workers for edge in topology.edges)
    routers = len(topology.regions)
    hosts = sum(edge.admin is not None for edge in topology.edges)
    megabytes = edges * EDGE_PROCESS_MB + hosts * HOST_PROCESS_MB + routers * ROUTER_PROCESS_MB
    megabytes += len(nodes) * NODE_PROCESS_MB + (ranks - len(nodes)) * RANK_PROCESS_MB
    split = f" of {ranks} ranks" if ranks > len(nodes) else ""
    return (
        f"  {routers} routers, {len(nodes)} nodes{split}, {edges} edge processes: "
        f"about {megabytes / 1000:.1f} GB of memory with the bundled model"
    )


def welcome(world: LocalWorld, *, usual_edge: str, where: str) -> str:
    """What one can do now. `usual_edge` is where `skerry chat` goes when it is told nothing;
    `where` are the options that lead to this world."""
    topology = world.world.topology
    first, model = next(iter(world.edges.values())), _model(topology)
    lines = [f"\nReady, {world.resident_mb_total()} MB in all. Logs: {world.logs}"]
    for edge in topology.edges:
        place = f" ({edge.place})" if edge.place else ""
        lines.append(f"  {world.edges[edge.name]}  edge {edge.name}{place}")
    lines += [f"  {line}" for line in sleeping(topology)]
    elsewhere = "" if usual_edge == first else f" --edge {first}"
    if (shown := files_of(world.world, topology.edges[0])) is not None:
        lines.append(
            "\nCallers speak https, by a name that the certificate has; where its authority is not "
            f"known:\n  export SSL_CERT_FILE={shlex.quote(str(shown.certificate))}"
        )
    key = needs_key(world.world)
    if key:
        lines.append(f"\n{key_line(topology, where)}")
    lines += ["\nAsk it:", indented(curl(first, model, key=key))]
    lines.append(indented(python(first, model, key=key)))
    lines += [f"  .venv/bin/skerry chat{elsewhere} '{QUESTION}'\n", "Ctrl-C stops everything."]
    return "\n".join(lines)


def sleeping(topology: Topology) -> Iterator[str]:
    """The models of which a region runs no node until somebody asks, and those that share a
    place."""
    for region in topology.regions:
        for name, pool in region.pools.items():
            models = dict.fromkeys(node.model for node in region.nodes if node.pool == name)
            room = "one node" if pool.places == 1 else f"{pool.places} nodes"
            yield f"{', '.join(models)} share pool {name} in {region.name}: {room} at a time"
        for model, scale in region.scale.items():
            if not scale.least:
                yield f"{model} is off in {region.name}: the first request starts a node"


def key_line(topology: Topology, where: str) -> str:
    tenant = next((name for name in topology.tenants if name != ANONYMOUS), None)
    if tenant is None:
        return "Callers need a key, and a key needs an owner: add [tenants.NAME] to the topology"
    command = f".venv/bin/skerry keys create --tenant {tenant}{where}"
    return f"Callers need a key: export SKERRY_KEY=$({command})"


def stopping(client: httpx.Client, routers: Mapping[str, str]) -> str:
    """What is said of the end. Routers that do not answer at once are not waited for."""
    views = (router_view(client, url, timeout_s=ASK_S) for url in routers.values())
    under_way = sum(view.active for view in views if view)
    if not under_way:
        return "stopping"
    one = "answer" if under_way == 1 else "answers"
    return f"stopping, {under_way} {one} under way; Ctrl-C again breaks off"


def _model(topology: Topology) -> str:
    """A short name for the lines to copy."""
    name, model = next(iter(topology.models.items()))
    return min((name, *model.aliases), key=len)
