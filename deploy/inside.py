"""How commands reach a world's routers: in plaintext, or by the operator's own certificate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import httpx

from core.config import Region, Topology, World
from core.tls import credentials_of
from deploy.calling import mounts

OPERATOR = "operator"
"""The name of the certificate that commands show."""


def router_url(topology: Topology, address: str) -> str:
    return f"{'https' if topology.tls.inside else 'http'}://{address}"


def door_urls(topology: Topology, regions: Iterable[Region]) -> dict[str, str]:
    """Of all routers of these regions, by their names, reached as the topology says."""
    return {
        name: router_url(topology, router.http)
        for region in regions
        for name, router in region.doors
    }


def client(
    world: World,
    *,
    timeout: httpx.Timeout | float = 5.0,
    headers: Mapping[str, str] | None = None,
) -> httpx.Client:
    """For a world's routers and edges. Raises ConfigError."""
    credentials = credentials_of(world, OPERATOR)
    return httpx.Client(
        trust_env=False,
        timeout=timeout,
        headers=headers,
        verify=True if credentials is None else credentials.client,
        mounts=mounts(world),
    )
