"""How each process of a world is started on this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from core.address import split_address
from core.config import World
from core.config_scale import at_first, first_nodes
from deploy.port_claims import Claims
from deploy.process import Spec
from deploy.releases import Release, own


class Makings:
    """`logs`: where each process's output goes; `listeners`: the sockets of edges by name;
    `claims`: what keeps the ports of all. Whoever gives these closes them."""

    def __init__(
        self, logs: Path, listeners: Mapping[str, socket.socket], claims: Claims | None = None
    ) -> None:
        self._logs = logs
        self._listeners = dict(listeners)
        self._claims = [] if claims is None else [claims]

    def adopt(self, listeners: Mapping[str, socket.socket], claims: Claims) -> None:
        """Of edges and regions that come while the world runs."""
        self._listeners.update(listeners)
        self._claims.append(claims)

    def free(self, addresses: Iterable[str]) -> None:
        """Nobody of this world listens there any more."""
        for address in addresses:
            for claims in self._claims:
                claims.give(split_address(address)[1])

    def disown(self, edge: str) -> None:
        """It is to go: nobody is accepted for it here any more."""
        if (listener := self._listeners.pop(edge, None)) is not None:
            listener.close()

    def all(self, world: World) -> list[Spec]:
        """Of those that run before anybody has asked for anything."""
        off = set(off_at_first(world))
        return [self.spec(world, name) for name in names(world) if name not in off]

    def spec(
        self,
        world: World,
        name: str,
        release: Release | None = None,
        more: tuple[socket.socket, ...] = (),
        *,
        beside: bool = False,
    ) -> Spec:
        """Of the process `name`. `more`: further sockets that an edge is to accept from, in
        plaintext; `beside`:
        the edge runs already, and this one is to take its place."""
        topology = world.topology
        base = ("--topology", str(world.path), "--state", str(world.state), "--name", name)
        environment = {"PYTHONUNBUFFERED": "1"}
        listeners: tuple[int, ...] = ()
        words: tuple[str, ...]
        if any(edge.name == name for edge in topology.edges):
            kind, module, words = "edge", "edge", base
            if name in self._listeners:
                listeners = tuple(one.fileno() for one in (self._listeners[name], *more))
                first = len(listeners) if topology.edge(name).tls is None else 1
                words = (*base, "--listen-fd", *map(str, listeners[:first]))
                if listeners[first:]:
                    words = (*words, "--plain-fd", *map(str, listeners[first:]))
            elif beside:
                words = (*base, "--beside")
        elif any(door == name for region in topology.regions for door, _ in region.doors):
            kind, module, words = "router", "regional", ("router", *base)
        else:
            _, node = topology.node(name)
            kind, module, words = "node", "regional", ("node", *base)
            # Threads of one node must not spin while another computes on the same cores.
            environment |= {"OMP_NUM_THREADS": str(node.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        log = self._logs / f"{name}.log"
        return Spec(
            name, kind, module, words, environment, log, listeners, release or own()
        )  # fmt: skip


def names(world: World) -> list[str]:
    """Of all processes, in the order in which they are started."""
    topology = world.topology
    return [
        *(door for region in topology.regions for door, _ in region.doors),
        *(node.name for region in topology.regions for node in region.nodes),
        *(edge.name for edge in topology.edges),
    ]


def off_at_first(world: World) -> Iterator[str]:
    """The nodes that are started when somebody asks for their model."""
    for region in world.topology.regions:
        running = {node.name for node in first_nodes(region, at_first(region))}
        yield from (node.name for node in region.nodes if node.name not in running)
