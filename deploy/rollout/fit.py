"""Whether a topology can take the place of the one that runs, and with which addresses. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from core.config import Edge, Region, Router, Topology, World
from core.config_check import Complaint
from core.types import Role


def self_contained(world: World) -> Topology:
    """Its topology without paths that hang on the place of its file."""
    models = {
        name: replace(model, source=world.model_source(name))
        for name, model in world.topology.models.items()
    }
    return replace(world.topology, models=models)


def settled(given: Topology, asked: Topology, running: Topology) -> Topology:
    """`given` with the addresses that the start found for those that are asked for as they were
    then (`asked`), port 0 above all. `running` is what the start made of `asked`."""
    asked_edges = {one.name: one for one in asked.edges}
    asked_regions = {one.name: one for one in asked.regions}
    edges = {now.name: (asked_edges.get(now.name, now), now) for now in running.edges}
    regions = {now.name: (asked_regions.get(now.name, now), now) for now in running.regions}
    return replace(
        given,
        edges=tuple(_edge(one, *edges[one.name]) if one.name in edges else one
                    for one in given.edges),
        regions=tuple(_region(one, *regions[one.name]) if one.name in regions else one
                      for one in given.regions),
    )  # fmt: skip


def with_those_of(given: Topology, other: Topology) -> Topology:
    """`given` with the regions and edges of `other` in place of its own of the same names."""
    regions = {one.name: one for one in other.regions}
    edges = {one.name: one for one in other.edges}
    return replace(
        given,
        regions=tuple(regions.get(one.name, one) for one in given.regions),
        edges=tuple(edges.get(one.name, one) for one in given.edges),
    )


def misfits(before: Topology, after: Topology) -> Iterator[Complaint]:
    """What a running world cannot take, the place in `after` first."""
    old_edges = {edge.name: edge for edge in before.edges}
    old_regions = {region.name: region for region in before.regions}
    for model in sorted((_served(before) - _served(after)) & after.models.keys()):
        yield Complaint(
            ("models", model),
            f"no region would serve {model!r} any more: take it out of [models] as well, or leave "
            "it a node that decodes",
        )
    if after.name != before.name:
        yield Complaint(
            ("name",), f"this is the topology of {after.name!r}, and {before.name!r} runs"
        )
    if after.secrets != before.secrets:
        yield Complaint(("secrets",), "secrets cannot change while the world runs")
    if after.tls != before.tls:
        yield Complaint(("tls",), "[tls] cannot change while the world runs")
    for place, edge in enumerate(after.edges):
        if (old := old_edges.get(edge.name)) is not None:
            for key in ("listen", "admin", "workers"):
                yield from _fixed(("edges", place, key), old, edge, key)
            if (old.tls is None) != (edge.tls is None):
                yield Complaint(
                    ("edges", place, "tls"),
                    f"edge {edge.name!r} cannot change between http and https while it runs: for a "
                    "while callers would find either; stop the world for that",
                )
    for place, region in enumerate(after.regions):
        if (was := old_regions.get(region.name)) is not None:
            for key in ("http", "grpc", "routers"):
                yield from _fixed(("regions", place, key), was, region, key)


def losses(unit: str, ran: Mapping[str, Topology], after: Topology) -> Iterator[Complaint]:
    """Models that callers of `unit`, an edge, have now and would not have any more, though regions
    serve them. `ran`: what processes run from, by name."""
    if unit not in ran or all(edge.name != unit for edge in after.edges):
        return
    missing = ran[unit].models.keys() - after.models.keys()
    for region in after.regions:
        nodes = ran[region.name].region(region.name).nodes if region.name in ran else ()
        for model in sorted({n.model for n in nodes if n.role is not Role.PREFILL} & missing):
            yield Complaint(
                ("models",),
                f"{model!r} is missing, which region {region.name} serves: callers of edge {unit} "
                f"would lose it; add it here, or `skerry deploy {region.name}` with this topology "
                f"first, or `skerry models remove {model}`",
            )


def _served(topology: Topology) -> set[str]:
    """Models that some region can answer with."""
    nodes = (node for region in topology.regions for node in region.nodes)
    return {node.model for node in nodes if node.role is not Role.PREFILL}


def _fixed(
    path: tuple[str | int, ...], old: Edge | Region, new: Edge | Region, key: str
) -> Iterator[Complaint]:
    was, now = getattr(old, key), getattr(new, key)
    if was != now:
        yield Complaint(
            path, f"{key} of {new.name!r} cannot change while it runs: it is {_shown(was)}"
        )


def _edge(given: Edge, asked: Edge, running: Edge) -> Edge:
    return replace(
        given,
        listen=_address(given.listen, asked.listen, running.listen),
        admin=running.admin if given.admin == asked.admin else given.admin,
    )


def _region(given: Region, asked: Region, running: Region) -> Region:
    return replace(
        given,
        http=_address(given.http, asked.http, running.http),
        grpc=_address(given.grpc, asked.grpc, running.grpc),
        routers=running.routers if given.routers == asked.routers else given.routers,
    )


def _address(given: str, asked: str, running: str) -> str:
    return running if given == asked or given.endswith(":0") else given


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(_shown(one) for one in value) or "none"
    return value.http if isinstance(value, Router) else repr(value)
