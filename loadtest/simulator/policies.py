"""The product's choice, and the ones it is measured against. Each sees the same views."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.config import Routing
from edge.routing.placement import (
    Asked,
    Option,
    Reason,
    RouteDecision,
    Standing,
    choose,
    load_bound_s,
)
from edge.routing.view import RegionView
from edge.routing.weights import WEIGHTS, Weights

RIVALS_ROUTING = Routing(load_margin_s=2.0)
"""The rivals' bound: they know no queue but by it, and do best with a narrow one."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the product's choice is given; the others look away."""

    routing: Routing = field(default_factory=Routing)
    weights: Weights = WEIGHTS


Policy = Callable[[Sequence[RegionView], Asked, Rules, random.Random], RouteDecision]


def product(
    view: Sequence[RegionView], asked: Asked, rules: Rules, _: random.Random
) -> RouteDecision:
    return choose(view, asked, rules.routing, rules.weights)


def ring_and_bound(
    view: Sequence[RegionView], asked: Asked, _: Rules, __: random.Random
) -> RouteDecision:
    """The first region of the key's walk that is not overloaded; no digests, no distances."""
    by_name = {region.name: region for region in view}
    return _bounded([by_name[name] for name in asked.walk], asked)


def nearest_and_bound(
    view: Sequence[RegionView], asked: Asked, _: Rules, __: random.Random
) -> RouteDecision:
    """Of regions that are equally near, the one that comes first in the walk."""
    by_name = {region.name: region for region in view}
    walk = [by_name[name] for name in asked.walk]
    return _bounded(sorted(walk, key=lambda region: region.round_trip_s), asked)


def least_loaded(
    view: Sequence[RegionView], asked: Asked, _: Rules, chance: random.Random
) -> RouteDecision:
    shuffled = chance.sample(list(view), len(view))
    return _first(sorted(shuffled, key=lambda region: region.work_s), asked)


def at_random(
    view: Sequence[RegionView], asked: Asked, _: Rules, chance: random.Random
) -> RouteDecision:
    return _first(chance.sample(list(view), len(view)), asked)


POLICIES: dict[str, Policy] = {
    "skerry": product,
    "ring + bound": ring_and_bound,
    "nearest + bound": nearest_and_bound,
    "random": at_random,
    "least loaded": least_loaded,
}


def _bounded(regions: Sequence[RegionView], asked: Asked) -> RouteDecision:
    usable = [region for region in regions if region.usable]
    if not usable:
        return _first(regions, asked)
    bound = load_bound_s([region.work_s for region in usable], RIVALS_ROUTING)
    first = next((region for region in usable if region.work_s <= bound), usable[0])
    return _first([first, *(region for region in usable if region is not first)], asked)


def _first(regions: Sequence[RegionView], asked: Asked) -> RouteDecision:
    usable = [region for region in regions if region.usable] or list(regions)
    taken = usable[0]
    read_s = asked.text_bytes / asked.bytes_per_token / taken.reads_per_s(asked.model)
    option = Option(
        region=taken.name,
        standing=Standing.TAKEN,
        round_trip_s=taken.round_trip_s,
        wait_s=taken.wait_s,
        read_s=read_s,
        held_tokens=0.0,
        work_s=taken.work_s,
        within_bound=True,
        cost_s=taken.distance_s + read_s,
    )
    reason = Reason.PREFIX_HOME if taken.name == asked.walk[0] else Reason.PREFIX_SPILL
    return RouteDecision(tuple(region.name for region in usable), reason, (option,))
