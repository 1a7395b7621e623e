"""How each process of a world is started on this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from core.config import World
from core.config_scale import at_first, first_nodes
from deploy.process import Spec
from deploy.releases import Release, own


class Makings:
    """`logs`: where each process's output goes; `listeners`: the sockets of edges by name."""

    def __init__(self, logs: Path, listeners: Mapping[str, socket.socket]) -> None:
        self._logs = logs
        self._listeners = dict(listeners)

    def adopt(self, listeners: Mapping[str, socket.socket]) -> None:
        """Of edges that come while the world runs. Whoever gives them closes them."""
        self._listeners.update(listeners)

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
