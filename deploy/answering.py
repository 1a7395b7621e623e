"""Which edges and routers of a running world do not answer: a process that is held, or hangs, is up
for whoever started it."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from core.config import World
from deploy.calling import worlds_at
from deploy.inside import client, door_urls
from deploy.ready import edge_urls
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
    topology = world.topology
    urls = {**edge_urls(topology), **door_urls(topology, topology.regions)}
    asked = {name: url for name, url in urls.items() if name not in heard}
    with client(world, timeout=PATIENCE_S) as http, ThreadPoolExecutor(AT_ONCE) as pool:

        def answers(url: str) -> bool:
            try:
                http.get(f"{url}/healthz")
            except httpx.TransportError:
                return False
            return True

        found = zip(asked, pool.map(answers, asked.values()), strict=True)
        return frozenset(name for name, answered in found if not answered)
