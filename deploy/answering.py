"""Which edges and routers of a running world do not answer: a process that is held, or hangs, is up
for whoever started it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from core.config import World
from deploy.calling import worlds_at
from deploy.inside import client, router_url
from deploy.state import FOLDER

PATIENCE_S = 5.0
AT_ONCE = 16


def silent_at(edge: str, heard: Collection[str], root: Path = FOLDER) -> frozenset[str]:
    """In the world here that has the edge at this URL; nobody where it runs elsewhere. `heard`:
    names of edges that need not be asked."""
    for world, _ in worlds_at(edge, root):
        return silent(world, heard)
    return frozenset()


def silent(world: World, heard: Collection[str] = ()) -> frozenset[str]:
    """All are asked at once. Any answer will do, also one that is a refusal."""
    asked = {name: url for name, url in _urls(world) if name not in heard}
    with client(world, timeout=PATIENCE_S) as http, ThreadPoolExecutor(AT_ONCE) as pool:

        def answers(url: str) -> bool:
            try:
                http.get(f"{url}/healthz")
            except httpx.TransportError:
                return False
            return True

        found = zip(asked, pool.map(answers, asked.values()), strict=True)
        return frozenset(name for name, answered in found if not answered)


def _urls(world: World) -> Iterator[tuple[str, str]]:
    topology = world.topology
    yield from ((edge.name, edge.url) for edge in topology.edges)
    for region in topology.regions:
        yield from ((name, router_url(topology, router.http)) for name, router in region.doors)
