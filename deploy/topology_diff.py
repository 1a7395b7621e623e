"""What differs between two topologies, which processes have to be started again for it, and which
routers take it in while they run. Pure.

Edges, regions and nodes are compared by name, so that one that moved in the file is no change; but
the first edge, which runs the timers of Workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

import msgspec

from core.config import Edge, Node, Region, Router, Topology, World

Path = tuple[str, ...]
_ABSENT = object()
_NAMED = ("edges", "regions", "nodes")
_ADDRESSES = ("http", "grpc", "routers")
_EDGE_KEYS = ("price", "residency")
"""Of a model: what edges alone read."""


@dataclass(frozen=True, slots=True)
class Change:
    """`old` or `new` is None where the key, or what is named, is on one side alone."""

    path: Path
    old: str | None
    new: str | None

    def __str__(self) -> str:
        where = ".".join(self.path)
        if self.old is None or self.new is None:
            sign, value = ("+", self.new) if self.old is None else ("-", self.old)
            return f"{sign} {where}" if value == "{}" else f"{sign} {where} = {value}"
        return f"~ {where}: {self.old} → {self.new}"


def changes(old: Topology, new: Topology) -> list[Change]:
    return [*_between((), _plain(old), _plain(new)), *_timers(old, new)]


def restarts(found: list[Change], new: Topology) -> list[str]:
    """Names of the processes of `new` that have to be started again, in the topology's order."""
    everyone = [
        *(region.name for region in new.regions),
        *(node.name for region in new.regions for node in region.nodes),
        *(edge.name for edge in new.edges),
    ]
    wanted = {name for change in found for name in _readers(change.path, new, everyone)}
    return [name for name in everyone if name in wanted]


def rereads(found: list[Change], new: Topology) -> list[str]:
    """Names of the regions of `new` whose routers have to be told, in the topology's order."""
    wanted = {name for change in found for name in _told(change.path, new)}
    return [region.name for region in new.regions if region.name in wanted]


def departing(old: Topology, new: Topology) -> list[str]:
    """Names of the processes of `old` that are not to run any more, in the topology's order."""
    stay = set(_processes(new))
    return [name for name in _processes(old) if name not in stay]


def _processes(topology: Topology) -> Iterator[str]:
    yield from (name for region in topology.regions for name, _ in region.doors)
    yield from (node.name for region in topology.regions for node in region.nodes)
    yield from (edge.name for edge in topology.edges)


def as_it_would_run(given: World, running: Topology) -> Topology:
    """`given` with what a start resolves: the ports that `running` found for port 0, and sources
    that do not hang on the place of the file."""
    edges = {edge.name: edge for edge in running.edges}
    regions = {region.name: region for region in running.regions}
    topology = given.topology
    return msgspec.structs.replace(
        topology,
        models={
            name: msgspec.structs.replace(model, source=given.model_source(name))
            for name, model in topology.models.items()
        },
        edges=tuple(
            _resolved(one, edges.get(one.name), ("listen", "admin")) for one in topology.edges
        ),
        regions=tuple(
            msgspec.structs.replace(
                _resolved(one, regions.get(one.name), ("http", "grpc")),
                routers=_routers(one, regions.get(one.name)),
            )
            for one in topology.regions
        ),
    )


def _routers(given: Region, found: Region | None) -> tuple[Router, ...]:
    running = () if found is None else found.routers
    return tuple(
        _resolved(one, ran, ("http", "grpc"))
        for one, ran in zip_longest(given.routers, running[: len(given.routers)])
    )


_Listening = TypeVar("_Listening", Edge, Region, Router)


def _resolved(given: _Listening, found: _Listening | None, keys: tuple[str, ...]) -> _Listening:
    """`given` with the ports that were found for its addresses with port 0."""
    if found is None:
        return given
    unset = (key for key in keys if (getattr(given, key) or "").endswith(":0"))
    return msgspec.structs.replace(given, **{key: getattr(found, key) for key in unset})


def _readers(path: Path, new: Topology, everyone: list[str]) -> Iterator[str]:
    """Who read what lies at `path` when they started, and do not look again."""
    edges = [edge.name for edge in new.edges]
    match path:
        case ("ssh", *_) | ("edges" | "regions", _, "ssh") | ("regions", _, "nodes", _, "ssh"):
            return
        case ("edges", name, *_):
            yield name
        case ("regions", _, "nodes", _, "pool"):
            return
        case ("regions", _, "nodes", node, *_):
            yield node
        case ("regions", region, key, *_) if key in _ADDRESSES:
            yield region
            yield from edges
            if key != "http":
                yield from (n.name for one in new.regions if one.name == region for n in one.nodes)
        case ("regions", _) | ("regions", _, "weight" | "place"):
            yield from edges  # the ring's walks
        case ("regions", _, _, *_):
            return
        case ("models", _, "digest"):
            return
        case ("models", model, *rest):
            yield from edges
            if not rest or rest[0] not in ("aliases", *_EDGE_KEYS):
                yield from (n.name for one in new.regions for n in one.nodes if n.model == model)
        case ("tenants" | "access" | "budgets" | "residency" | "currency" | "routing", *_):
            yield from edges
        case _:
            yield from everyone


def _told(path: Path, new: Topology) -> Iterator[str]:
    """The regions whose routers go on with what lies at `path`, once they are told."""
    match path:
        case ("regions", _, "ssh") | ("regions", _, "nodes", _, "ssh"):
            return
        case ("regions", _):
            yield from (region.name for region in new.regions)
        case ("regions", region, _, *_):
            yield region
        case ("models", _, key, *_) if key in ("digest", *_EDGE_KEYS):
            return
        case ("models", model, *_):
            yield from (r.name for r in new.regions if any(n.model == model for n in r.nodes))


def _timers(old: Topology, new: Topology) -> Iterator[Change]:
    """Of edges that are in both: which one runs the timers of Workers no longer, and which one does
    from now on."""
    was, now = old.edges[0], new.edges[0]
    if was.name != now.name:
        if was.admin is not None and any(edge.name == was.name for edge in new.edges):
            yield Change(("edges", was.name, "timers"), "true", None)
        if now.admin is not None and any(edge.name == now.name for edge in old.edges):
            yield Change(("edges", now.name, "timers"), None, "true")


def _between(path: Path, old: object, new: object) -> Iterator[Change]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _between((*path, str(key)), old.get(key, _ABSENT), new.get(key, _ABSENT))
    elif old != new:
        yield Change(path, _written(old), _written(new))


def _written(value: object) -> str | None:
    """A whole table that came or went is said by its name: what is in it, the file shows."""
    if value is _ABSENT:
        return None
    return "{}" if isinstance(value, Mapping) else msgspec.json.encode(value).decode()


def _plain(value: object, key: str = "") -> object:
    """Tables as mappings; arrays of what has names as mappings by name."""
    if isinstance(value, tuple) and key in _NAMED and not any(isinstance(v, str) for v in value):
        return {one.name: _plain(one) for one in value if isinstance(one, Edge | Region | Node)}
    if isinstance(value, msgspec.Struct):
        return {name: _plain(one, name) for name, one in msgspec.structs.asdict(value).items()}
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value
