"""The choice of a region, as a pure function: same view, same request, same answer.

In order of precedence:

1. A caller's affinity id takes the place of the prompt: its ring walk decides.
2. A short prompt goes to the nearest region (round trip + queue): reading it again is cheaper
   than travelling.
3. Otherwise the first region of the prompt key's ring walk whose work in flight is within
   max(ratio × mean, mean + margin) seconds. The walk's order is fixed, so a hot prefix that
   overflows lives on few regions and comes home when load falls.

Regions that drain or lack the model are skipped. Regions whose status is stale come last, whatever
the walk says. What follows the first candidate is the fail-over order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from core.config import Routing
from core.errors import RegionUnavailable
from core.status import RegionStatus
from core.types import ModelName, RegionName


class Reason(StrEnum):
    """Why a region was taken; the value of `x-skerry-route` and a metric label."""

    AFFINITY = "affinity"
    NEAREST_SHORT = "nearest_short"
    PREFIX_HOME = "prefix_home"
    PREFIX_SPILL = "prefix_spill"
    """The key's home is full or out."""
    FAILOVER = "failover"
    """An earlier candidate failed before the first delta."""


@dataclass(frozen=True, slots=True)
class RegionView:
    """A region as an edge sees it at one moment.

    `status` None: never heard of. `age_s` is the time since its last frame. `fresh`: connected and
    heard of within `core.status.STALE_S`.
    """

    name: RegionName
    round_trip_s: float
    configured: frozenset[ModelName]
    """The models that the topology gives it."""
    fresh: bool = False
    age_s: float | None = None
    status: RegionStatus | None = None

    @property
    def work_s(self) -> float:
        if self.status is None:
            return 0.0
        return self.status.prefill_work_s + self.status.decode_work_s + self.status.queue_s

    @property
    def distance_s(self) -> float:
        """What a request waits before a region begins with it."""
        return self.round_trip_s + (self.status.queue_s if self.status else 0.0)

    def serves(self, model: ModelName) -> bool:
        """As far as we know: a fresh status is believed, else the topology."""
        if self.fresh and self.status is not None:
            return any(one.name == model for one in self.status.models)
        return model in self.configured

    @property
    def draining(self) -> bool:
        return self.fresh and self.status is not None and self.status.draining


@dataclass(frozen=True, slots=True)
class Asked:
    """What the choice needs to know of a request. `walk`: the ring walk of its key."""

    model: ModelName
    walk: tuple[RegionName, ...]
    text_bytes: int
    by_affinity: bool


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """`candidates` in the order to try; `reason` is that of the first."""

    candidates: tuple[RegionName, ...]
    reason: Reason


def choose(view: Iterable[RegionView], asked: Asked, policy: Routing) -> RouteDecision:
    """Raises RegionUnavailable when no region can be asked at all."""
    known = {region.name: region for region in view}
    walk = [known[name] for name in asked.walk if name in known]
    usable = [region for region in walk if region.serves(asked.model) and not region.draining]
    if not usable:
        raise RegionUnavailable(f"no region serves {asked.model} at the moment", retry_after_s=1.0)
    fresh = [region for region in usable if region.fresh]
    suspect = [region for region in usable if not region.fresh]

    if not asked.by_affinity and asked.text_bytes < policy.short_prompt_bytes:
        near = sorted(fresh, key=lambda region: region.distance_s)
        return _decision([*near, *suspect], Reason.NEAREST_SHORT)

    first = _within_bound(fresh, policy) if fresh else suspect[0]
    home = next(region for region in walk if asked.model in region.configured or region is first)
    ordered = [first, *(region for region in [*fresh, *suspect] if region is not first)]
    if first is not home:
        return _decision(ordered, Reason.PREFIX_SPILL)
    return _decision(ordered, Reason.AFFINITY if asked.by_affinity else Reason.PREFIX_HOME)


def load_bound_s(work_s: Sequence[float], policy: Routing) -> float:
    """Seconds of work above which a region takes no more by its place on the ring."""
    mean = sum(work_s) / len(work_s)
    return max(policy.load_ratio * mean, mean + policy.load_margin_s)


def _within_bound(fresh: Sequence[RegionView], policy: Routing) -> RegionView:
    bound = load_bound_s([region.work_s for region in fresh], policy)
    return next((region for region in fresh if region.work_s <= bound), fresh[0])


def _decision(regions: Sequence[RegionView], reason: Reason) -> RouteDecision:
    return RouteDecision(tuple(region.name for region in regions), reason)
