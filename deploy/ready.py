"""Who has come up: asked over HTTP, as an operator would.

A router is up when it answers, a node when its router counts it as alive, an edge when it is
ready to take requests, and its host of Workers answers. The world is ready when all are up and
every router says so too.
"""

from __future__ import annotations

from collections.abc import Iterable

import httpx
import msgspec

from core.config import Topology
from core.config_scale import at_first, first_nodes
from core.status import NodeStatus, RegionMore
from deploy.inside import door_urls, router_url

TIMEOUT_S = 2.0


class RouterView(msgspec.Struct, frozen=True):
    """The part of a router's `/status` that is looked at here."""

    nodes: tuple[NodeStatus, ...] = ()
    active: int = 0
    more: RegionMore = RegionMore()


class Probe:
    """Remembers who is up already; each `poll` returns who came up since the last one."""

    def __init__(self, client: httpx.Client, topology: Topology) -> None:
        self._client = client
        self._edges = edge_urls(topology)
        self._admins = {e.name: f"http://{e.admin}" for e in topology.edges if e.admin is not None}
        self._routers = door_urls(topology, topology.regions)
        self._nodes = {
            node.name: r.name for r in topology.regions for node in first_nodes(r, at_first(r))
        }
        self._up: set[str] = set()

    @property
    def missing(self) -> list[str]:
        everyone = [*self._routers, *self._nodes, *self._edges]
        return [name for name in everyone if name not in self._up]

    def poll(self) -> list[str]:
        fresh = list(self._poll_routers())
        self._up.update(fresh)
        edges = self.missing  # at last: their sockets take callers before there is a process
        if any(name not in self._edges for name in edges):
            return fresh
        fresh += [
            name
            for name in edges
            if self._answers(self._edges[name], "/readyz")
            and (name not in self._admins or self._answers(self._admins[name], "/healthz"))
        ]
        self._up.update(fresh)
        return fresh

    def ready(self) -> bool:
        return not self.missing and all(
            self._answers(url, "/readyz") for url in self._routers.values()
        )

    def _poll_routers(self) -> Iterable[str]:
        missing = set(self.missing)
        for region, url in self._routers.items():
            if region in missing and self._answers(url, "/healthz"):
                yield region
        waited_for = {self._nodes[name] for name in missing if name in self._nodes}
        for region in waited_for:
            view = router_view(self._client, self._routers[region])
            for node in view.nodes if view else ():
                if node.name in missing and node.alive:
                    yield node.name

    def _answers(self, url: str, path: str) -> bool:
        try:
            return self._client.get(url + path, timeout=TIMEOUT_S).is_success
        except httpx.HTTPError:
            return False


def router_view(
    client: httpx.Client, url: str, *, timeout_s: float = TIMEOUT_S
) -> RouterView | None:
    """A router's view of its nodes; None when it does not answer."""
    try:
        answer = client.get(url + "/status", timeout=timeout_s)
        return msgspec.json.decode(answer.content, type=RouterView) if answer.is_success else None
    except (httpx.HTTPError, msgspec.MsgspecError):
        return None


def edge_urls(topology: Topology) -> dict[str, str]:
    return {edge.name: edge.url for edge in topology.edges}


def router_urls(topology: Topology) -> dict[str, str]:
    return {region.name: router_url(topology, region.http) for region in topology.regions}
