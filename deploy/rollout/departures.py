"""A region or an edge that a running world is not to have any more: everybody who chooses it is
told first, it ends what it has, then its processes go. Pure.

Whatever can fail comes before the first edge leaves: an edge that has turned callers away is not
brought back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from msgspec.structs import replace

from core.config import Edge, Region, Topology
from core.errors import ConfigError
from deploy.rollout.arrivals import named, newcomers
from deploy.rollout.plan import Standing, Wish, as_it_runs, has_stand_in, mute_of, plan, retold
from deploy.rollout.steps import Empty, Idle, Kind, Leave, Rest, Step, Stop


def leavers(before: Topology, after: Topology) -> tuple[list[Region], list[Edge]]:
    """The regions and edges of `before` that `after` does not have."""
    return newcomers(after, before)


def depart(wish: Wish, was: Topology, before: Standing) -> list[tuple[Step, ...]]:
    """The steps of each unit, for all that `was` has and the wished topology has not. Raises
    ConfigError for a wish that is about something else, and where callers would lose a region that
    nobody stands in for."""
    regions, edges = leavers(was, wish.topology)
    gone = {one.name for one in regions}
    names = gone | {one.name for one in edges}
    if wish.unit not in names:
        raise ConfigError(
            f"{named(regions, edges)} is not in this topology any more: take it out with "
            f"`skerry deploy {min(names)} --topology FILE` first"
        )
    if wish.canary is not None or wish.release is not None or wish.again:
        raise ConfigError(
            f"{wish.unit!r} is to go: --release, --again and --canary are for what is to run"
        )
    for region in regions:
        _check_stand_in(region, gone, was, wish.topology, before)
    spoken_to = {one.name: mute_of(one, before) for one in regions if one.name not in before.silent}
    plans: list[tuple[Step, ...]] = [
        (Rest(Kind.REGION, name, True, leaving=True, but=but), Empty(name, but))
        for name, but in spoken_to.items()
    ]
    plans += [retold(one, wish, before) for one in wish.topology.regions]
    plans += [
        plan(Wish(unit=edge.name, topology=wish.topology), before) for edge in wish.topology.edges
    ]
    plans += [(Idle(Kind.REGION, name, but=but),) for name, but in spoken_to.items()]
    plans += [tuple(Stop(name) for name in _processes(one, before)) for one in regions]
    return [*plans, *((Leave(edge.name),) for edge in edges)]


def _check_stand_in(
    region: Region, gone: set[str], was: Topology, after: Topology, before: Standing
) -> None:
    """Raises ConfigError where what the region gets now would have nowhere to go."""
    if region.name in before.silent | before.resting:  # it gets nothing
        return
    runs = as_it_runs(region, before)
    nodes = tuple(node for node in runs.nodes if node.model in after.models)
    staying = dataclasses.replace(before, serving=before.serving - gone)
    if not has_stand_in(replace(region, nodes=nodes), staying, was):
        models = ", ".join(sorted({node.model for node in nodes}))
        raise ConfigError(
            f"region {region.name} cannot go now: no other region that every edge hears may take "
            f"all that it gets ({models}, and whose residency names it)"
        )


def _processes(region: Region, before: Standing) -> Iterator[str]:
    """Nodes first: their routers see them off."""
    nodes = as_it_runs(region, before).nodes
    names = dict.fromkeys((*(n.name for n in nodes), *(n.name for n in region.nodes)))
    yield from (
        name for name in (*names, *(d for d, _ in region.doors)) if name in before.processes
    )
