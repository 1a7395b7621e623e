"""A region or an edge that a running world does not have yet: its processes first, then everybody
who has to know of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.config import Edge, Region, Topology
from core.config_scale import at_first, first_nodes
from core.errors import ConfigError
from deploy.rollout.plan import Standing, Wish, plan, retold
from deploy.rollout.steps import Heard, Hosting, Ready, Shelve, Start, Step


def newcomers(before: Topology, after: Topology) -> tuple[list[Region], list[Edge]]:
    """The regions and edges of `after` that `before` does not have."""
    regions = {region.name for region in before.regions}
    edges = {edge.name for edge in before.edges}
    return (
        [region for region in after.regions if region.name not in regions],
        [edge for edge in after.edges if edge.name not in edges],
    )


def named(regions: Sequence[Region], edges: Sequence[Edge]) -> str:
    """To be said."""
    return ", ".join(sorted([*(one.name for one in regions), *(one.name for one in edges)]))


def arrive(
    wish: Wish, regions: Sequence[Region], edges: Sequence[Edge], before: Standing
) -> list[tuple[Step, ...]]:
    """The steps of each unit. `regions` and `edges` are all that come. Raises ConfigError for a
    wish that is about something else."""
    names = {region.name for region in regions} | {edge.name for edge in edges}
    if wish.unit not in names:
        raise ConfigError(
            f"{named(regions, edges)} is new in this topology: bring it with "
            f"`skerry deploy {min(names)} --topology FILE` first"
        )
    if wish.canary is not None:
        raise ConfigError(f"{wish.unit!r} is new: there is nothing to compare a canary with")
    plans = [tuple(_region(one)) for one in regions]
    plans += [retold(one, wish, before) for one in wish.topology.regions if one.name not in names]
    for edge in wish.topology.edges:
        if edge.name not in names:
            plans.append(plan(Wish(unit=edge.name, topology=wish.topology), before))
    plans += [tuple(_edge(one, before)) for one in edges]
    return [*plans, tuple(Heard(one.name) for one in regions)]


def _edge(edge: Edge, before: Standing) -> Iterator[Step]:
    workers = tuple(sorted(before.shelved)) if edge.admin is not None else ()
    if workers:
        yield Shelve(edge.name, workers)
    yield Start(edge.name)
    yield Ready((edge.name,))
    if workers:
        yield Hosting(edge.name)


def _region(region: Region) -> Iterator[Step]:
    running = {node.name for node in first_nodes(region, at_first(region))}
    doors = [name for name, _ in region.doors]
    yield from (Start(name) for name in doors)
    for node in region.nodes:
        yield Start(node.name, later=node.name not in running)
    yield Ready((*doors, *(node.name for node in region.nodes if node.name in running)))
