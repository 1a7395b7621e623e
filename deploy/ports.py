"""Concrete addresses for a topology: port 0 becomes a free port, a busy port the next free one.

The sockets of edges of one process are kept and handed on, so nobody can take their ports between
the choice and the listening. The other ports are claimed among worlds (`port_claims`); should
another program take one all the same, the process that wanted it says so and ends at once.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import msgspec

from core.address import split_address
from core.config import Edge, Router, Topology
from core.errors import ConfigError
from deploy.port_claims import Claims, shuffled

TRIES = 200
"""Ports tried after a busy one."""


@dataclass(frozen=True, slots=True)
class Move:
    """A port that was taken, and what stands in for it."""

    who: str
    wanted: str
    got: str

    def __str__(self) -> str:
        return f"{self.who}: {self.wanted} is in use, taking {self.got}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """`listeners`: a listening socket for each edge of one process, by its name; `claims` hold the
    ports, unless they were let go at once."""

    topology: Topology
    moves: tuple[Move, ...]
    claims: Claims
    listeners: Mapping[str, socket.socket] = field(default_factory=dict)


def resolve(topology: Topology, kept: ExitStack | None = None) -> Resolved:
    """With `kept`, claims and the edges' sockets last until it is closed; without, nothing does.
    Raises ConfigError when an address cannot be had at all."""
    moves: list[Move] = []
    listeners: dict[str, socket.socket] = {}
    with ExitStack() as held:  # all at once, so that no two get the same
        claims = (held if kept is None else kept).enter_context(closing(Claims()))

        def bound(who: str, address: str) -> tuple[str, socket.socket]:
            host, port = split_address(address)
            probe = _bind_near(host, port, who, claims)
            got = f"{host if ':' not in host else f'[{host}]'}:{probe.getsockname()[1]}"
            if port and got != address:
                moves.append(Move(who, address, got))
            return got, probe

        def concrete(who: str, address: str) -> str:
            got, probe = bound(who, address)
            held.enter_context(probe)
            return got

        def door(edge: Edge) -> str:
            got, listener = bound(f"edge {edge.name}", edge.listen)
            if kept is None or edge.workers > 1:  # workers bind their sockets themselves
                held.enter_context(listener)
            else:
                listeners[edge.name] = kept.enter_context(listener)
            return got

        edges = tuple(
            msgspec.structs.replace(
                edge,
                listen=door(edge),
                admin=edge.admin and concrete(f"admin of edge {edge.name}", edge.admin),
            )
            for edge in topology.edges
        )
        regions = tuple(
            msgspec.structs.replace(
                region,
                http=concrete(f"region {region.name}", region.http),
                grpc=concrete(f"region {region.name}", region.grpc),
                routers=tuple(
                    Router(concrete(name, one.http), concrete(name, one.grpc))
                    for name, one in region.doors[1:]
                ),
            )
            for region in topology.regions
        )
    resolved = msgspec.structs.replace(topology, edges=edges, regions=regions)
    return Resolved(resolved, tuple(moves), claims, listeners)


def refuse_unfixed(topology: Topology, path: str) -> None:
    """For a process that is started by itself: port 0 tells it nothing of the others. Raises
    ConfigError."""
    for region in topology.regions:
        addresses = [at for _, one in region.doors for at in (one.http, one.grpc)]
        if any(split_address(one)[1] == 0 for one in addresses):
            raise ConfigError(
                f"{path}: processes that start by themselves find each other by the file alone: "
                f"give regions.{region.name} http and grpc fixed ports"
            )


def _bind_near(host: str, port: int, who: str, claims: Claims) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = min(port + TRIES, 65535)
    for candidate in range(port, last + 1) if port else shuffled():
        if not claims.take(candidate):
            continue
        probe = socket.socket(family, socket.SOCK_STREAM)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, candidate))
            probe.listen(1)  # only a listening socket keeps the next probe from the same port
        except OSError as error:
            probe.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError(f"{who}: cannot listen on {host}: {error.strerror}") from error
        else:
            return probe
    where = f"from {port} to {last}" if port else "at all"
    raise ConfigError(f"{who}: no free port on {host} {where}")
