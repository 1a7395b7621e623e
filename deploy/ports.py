"""Concrete addresses for a topology: port 0 becomes a free port, a busy port the next free one.

Nothing is held open afterwards, so another program may take a port in between; the process that
wanted it then ends at once and its launcher says so.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from core.address import split_address
from core.config import Router, Topology
from core.errors import ConfigError

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
    topology: Topology
    moves: tuple[Move, ...]


def resolve(topology: Topology) -> Resolved:
    """Raises ConfigError when an address cannot be had at all."""
    moves: list[Move] = []
    with ExitStack() as held:  # all at once, so that no two get the same

        def concrete(who: str, address: str) -> str:
            host, port = split_address(address)
            probe = held.enter_context(_bind_near(host, port, who))
            got = f"{host if ':' not in host else f'[{host}]'}:{probe.getsockname()[1]}"
            if port and got != address:
                moves.append(Move(who, address, got))
            return got

        edges = tuple(
            msgspec.structs.replace(
                edge,
                listen=concrete(f"edge {edge.name}", edge.listen),
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
    return Resolved(msgspec.structs.replace(topology, edges=edges, regions=regions), tuple(moves))


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
    for edge in topology.edges:
        if edge.admin is not None and split_address(edge.admin)[1] == 0:
            raise ConfigError(
                f"{path}: `skerry worker` finds an edge by the file alone: give edge {edge.name} "
                "an admin address with a fixed port"
            )


def _bind_near(host: str, port: int, who: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = min(port + TRIES, 65535) if port else 0
    for candidate in range(port, last + 1):
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
    raise ConfigError(f"{who}: no free port on {host} from {port} to {last}")
