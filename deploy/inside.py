"""How commands reach a world's routers: in plaintext, or by the operator's own certificate."""

from __future__ import annotations

import httpx

from core.config import Topology, World
from core.tls import credentials_of

OPERATOR = "operator"
"""The name of the certificate that commands show."""


def router_url(topology: Topology, address: str) -> str:
    return f"{'https' if topology.tls.inside else 'http'}://{address}"


def client(world: World, *, timeout: httpx.Timeout | float = 5.0) -> httpx.Client:
    """For routers, and for edges in plaintext as well. Raises ConfigError."""
    credentials = credentials_of(world, OPERATOR)
    if credentials is None:
        return httpx.Client(trust_env=False, timeout=timeout)
    return httpx.Client(trust_env=False, timeout=timeout, verify=credentials.client)
