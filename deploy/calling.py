"""How commands reach edges, also those that speak https.

One of a world of this machine is known by its certificate (`core.pins`), which names the host that
callers use and not the address that is dialled here; any other by the system's authorities, or
those that SSL_CERT_FILE names.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from core.config import Edge, World, load
from core.errors import ConfigError
from core.pins import Pins, pins_of
from deploy.state import FOLDER, running_folders


class PinnedTransport(httpx.HTTPTransport):
    """Looks for certificates that have come before it connects."""

    def __init__(self, pins: Pins) -> None:
        super().__init__(verify=pins.context, trust_env=False)
        self._pins = pins

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._pins.look()
        return super().handle_request(request)


def mounts(world: World) -> Mapping[str, httpx.BaseTransport]:
    """For a client that also asks others than edges."""
    pins = ((edge, pins_of(world, edge)) for edge in world.topology.edges)
    return {edge.url: PinnedTransport(one) for edge, one in pins if one is not None}


def edge_client(
    base: str,
    *,
    headers: Mapping[str, str] | None = None,
    timeout: httpx.Timeout | float = 5.0,
    root: Path = FOLDER,
) -> httpx.Client:
    """For the edge at the URL `base`."""
    if not base.startswith("https://"):
        return httpx.Client(trust_env=False, headers=headers, timeout=timeout)
    for world, edge in worlds_at(base, root):
        if (pins := pins_of(world, edge)) is not None:
            return httpx.Client(
                transport=PinnedTransport(pins), trust_env=False, headers=headers, timeout=timeout
            )
    verify = ssl.create_default_context()
    return httpx.Client(verify=verify, trust_env=False, headers=headers, timeout=timeout)


def worlds_at(base: str, root: Path) -> Iterator[tuple[World, Edge]]:
    """The edge of that URL, in a world that runs here."""
    for folder, current in running_folders(root).items():
        for name, url in current.edges.items():
            if url == base.rstrip("/") and current.topology:
                try:
                    world = load(Path(current.topology), state=folder)
                    yield world, world.topology.edge(name)
                except ConfigError:  # of another release
                    continue


def tls_reason(error: BaseException) -> str | None:
    """Why a connection was not made, where its TLS is the reason."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, ssl.SSLCertVerificationError):
            return (
                f"its certificate is not believed here: {at.verify_message}; callers use a name "
                "that it has, and where its authority is none of the system's, SSL_CERT_FILE says "
                "the authority's file"
            )
        if isinstance(at, ssl.SSLError):
            return f"it does not speak https, or no version that is spoken here ({at.reason})"
        at = at.__cause__ or at.__context__
    return None
