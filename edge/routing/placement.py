"""The choice of a region, as a pure function: same view, same request, same answer.

Before anything else, regions outside the residency set do not exist for a request: no hop leaves
it, even when all its regions are dead. Then, in order of precedence:

1. A caller's affinity id takes the place of the prompt: the first region of its ring walk within
   the load bound.
2. A short prompt goes to the faster (round trip + wait + reading) of two regions drawn by weight:
   nearly always the nearest, and never all edges' short prompts at one place.
3. Otherwise the candidates are the two nearest regions, the first two of the prompt key's ring
   walk and the two whose cache digests hold most of the prompt. Of those within the load bound
   the cheapest: round trip + wait + what it would have to read, which weighs more (`READ_WEIGHT`).
   If none is within the bound, the first region of the walk that is.

**Load bound**: max(ratio × mean, mean + margin) seconds of work, where work is what a region
publishes plus what this edge has sent there since. A region that comes back has a part of it.

Regions that drain or lack the model are skipped. Regions whose status is stale, or that failed
several times in a row, come last, whatever the walk says. What follows the first candidate is the
fail-over order: the walk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from core.config import Routing
from core.errors import RegionUnavailable
from core.status import ModelStatus, RegionStatus
from core.types import ModelName, RegionName

NEAREST, FIRST_OF_WALK, FULLEST = 2, 2, 2
UNMEASURED_TOKENS_PER_S = 1000.0
BYTES_PER_TOKEN = 4.0
"""Until answers have told the true figure of a model."""
SAME_S = 1e-9
READ_WEIGHT = 5.0
"""A second of reading costs more than a second of waiting: the prompts behind wait for it too, and
its blocks push others out of the cache. Judged by the simulator: with 1 a request runs away from a
short queue at the place that holds its prefix, and everybody's time to the first token grows."""
HOME_SLACK = 0.1
"""Of the time that its reading takes: what a prompt that nobody holds may lose on the way home."""
HOME_WAIT = 0.01
"""The same, by waiting there: otherwise cold prompts are what evens out the load."""
HOMING_S = 0.1
"""The mean cost to a request of bringing a hot prefix home that lives elsewhere."""
HOMING_BACK_S = 1.0
"""The same, of any prefix, while its home gathers again what it lost."""
_FLOOR_S = 0.005
"""Added to distances before short prompts are drawn: no region is infinitely near."""


class Reason(StrEnum):
    """Why a region was taken; the value of `x-skerry-route` and a metric label."""

    AFFINITY = "affinity"
    AFFINITY_SPILL = "affinity_spill"
    """The affinity id's home is full or out."""
    NEAREST_SHORT = "nearest_short"
    PREFIX_HOME = "prefix_home"
    """The first of the walk: it holds the prefix or is to hold it."""
    PREFIX_HELD = "prefix_held"
    """Another region holds so much of the prompt that it is the fastest."""
    FASTEST = "fastest"
    """Nearer or idler, though the prompt has to be read there."""
    PREFIX_SPILL = "prefix_spill"
    """The key's home is full or out."""
    FAILOVER = "failover"
    """An earlier candidate failed before the first delta."""


class Cache(Protocol):
    """What an edge believes a region to hold."""

    def overlap(self, ids: Sequence[bytes], now: float) -> int: ...


@dataclass(frozen=True, slots=True)
class RegionView:
    """A region as an edge sees it at one moment.

    `status` None: never heard of. `age_s` is the time since its last frame. `fresh`: connected and
    heard of within `core.status.STALE_S`. `broken`: attempts there failed lately. `sent_s`: work
    that this edge sent and the status cannot show yet, less what it knows to be done. `ramp`:
    share of its fair load that it should bear now; `returned`: it came back lately. `at`: the
    edge's clock at that moment.
    """

    name: RegionName
    round_trip_s: float
    configured: frozenset[ModelName]
    """The models that the topology gives it."""
    fresh: bool = False
    age_s: float | None = None
    status: RegionStatus | None = None
    cache: Cache | None = None
    broken: bool = False
    sent_s: float = 0.0
    ramp: float = 1.0
    returned: bool = False
    weight: int = 100
    at: float = 0.0

    @property
    def work_s(self) -> float:
        return self.wait_s + (self.status.decode_work_s if self.status else 0.0)

    @property
    def wait_s(self) -> float:
        """Before a prompt that comes now is begun: the prompts that are in front of it."""
        if self.status is None:
            return max(0.0, self.sent_s)
        # A region whose readers are busy counts their backlog into its queue's time as well.
        published = max(self.status.prefill_work_s, self.status.queue_s)
        return max(0.0, published + self.sent_s)

    @property
    def distance_s(self) -> float:
        """What a request waits before a region begins with it."""
        return self.round_trip_s + self.wait_s

    @property
    def usable(self) -> bool:
        """In its full rights; others come last."""
        return self.fresh and not self.broken

    def serves(self, model: ModelName) -> bool:
        """As far as we know: a fresh status is believed, else the topology."""
        if self.fresh and self.status is not None:
            return self._model(model) is not None
        return model in self.configured

    def reads_per_s(self, model: ModelName) -> float:
        """Prompt tokens a second."""
        known = self._model(model)
        rate = known.prefill_tokens_per_s if known else 0.0
        return rate if rate > 0 else UNMEASURED_TOKENS_PER_S

    @property
    def draining(self) -> bool:
        return self.fresh and self.status is not None and self.status.draining

    def _model(self, name: ModelName) -> ModelStatus | None:
        if self.status is None:
            return None
        return next((one for one in self.status.models if one.name == name), None)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the choice needs to know of a request. `walk`: the ring walk of its key.

    `ids` and `ends` describe its chain of text blocks (core.prefix): ids, and bytes covered by
    each. `hot`: its key went deeper than the usual depth. `allowed`: the regions that its tenant
    or model may use, None for all. `draws`: two numbers in [0, 1).
    """

    model: ModelName
    walk: tuple[RegionName, ...]
    text_bytes: int
    by_affinity: bool
    ids: Sequence[bytes] = ()
    ends: Sequence[int] = ()
    bytes_per_token: float = BYTES_PER_TOKEN
    hot: bool = False
    allowed: frozenset[RegionName] | None = None
    draws: tuple[float, float] = (0.5, 0.5)


@dataclass(frozen=True, slots=True)
class Option:
    """A region as it was weighed for one request: all times in seconds."""

    region: RegionName
    round_trip_s: float
    wait_s: float
    read_s: float
    """For what is not cached there."""
    held_tokens: float
    work_s: float
    within_bound: bool

    @property
    def total_s(self) -> float:
        """The predicted time to the first token."""
        return self.round_trip_s + self.wait_s + self.read_s

    @property
    def cost_s(self) -> float:
        """What is compared."""
        return self.round_trip_s + self.wait_s + READ_WEIGHT * self.read_s


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """`candidates` in the order to try; `reason` is that of the first. `options`: what was
    weighed, for whoever asks why; empty where nothing had to be."""

    candidates: tuple[RegionName, ...]
    reason: Reason
    options: tuple[Option, ...] = field(default=(), compare=False)

    def work_s(self, region: RegionName) -> float:
        """Seconds of reading that the request brings to `region`, as far as it was weighed."""
        return next((one.read_s for one in self.options if one.region == region), 0.0)


def choose(view: Iterable[RegionView], asked: Asked, policy: Routing) -> RouteDecision:
    """Raises RegionUnavailable when no region can be asked at all."""
    known = {region.name: region for region in view}
    walk = [
        known[name]
        for name in asked.walk
        if name in known and (asked.allowed is None or name in asked.allowed)
    ]
    possible = [region for region in walk if region.serves(asked.model) and not region.draining]
    if not possible:
        where = "" if asked.allowed is None else " where this request may go"
        raise RegionUnavailable(
            f"no region serves {asked.model}{where} at the moment", retry_after_s=1.0
        )
    usable = [region for region in possible if region.usable]
    last = [region for region in possible if not region.usable]
    home = next(region for region in walk if asked.model in region.configured or region in possible)

    if not usable:
        spilled = Reason.AFFINITY_SPILL if asked.by_affinity else Reason.PREFIX_SPILL
        at_home = Reason.AFFINITY if asked.by_affinity else Reason.PREFIX_HOME
        return _decision(last, at_home if last[0] is home else spilled)
    if asked.by_affinity:
        first = _within_bound(usable, policy)
        reason = Reason.AFFINITY if first is home else Reason.AFFINITY_SPILL
        return _decision([*_first(first, usable), *last], reason)
    if asked.text_bytes < policy.short_prompt_bytes:
        return _decision([*_short(usable, asked), *last], Reason.NEAREST_SHORT)
    return _fastest(usable, last, home, asked, policy)


def load_bound_s(work_s: Sequence[float], policy: Routing) -> float:
    """Seconds of work above which a region takes no more by its place on the ring."""
    mean = sum(work_s) / len(work_s)
    return max(policy.load_ratio * mean, mean + policy.load_margin_s)


def _fastest(
    usable: Sequence[RegionView],
    last: Sequence[RegionView],
    home: RegionView,
    asked: Asked,
    policy: Routing,
) -> RouteDecision:
    bound = load_bound_s([region.work_s for region in usable], policy)
    options = [_option(region, asked, bound) for region in usable]
    candidates = _candidates(options)
    within = [option for option in candidates if option.within_bound]
    if within:
        least = min(option.cost_s for option in within)
        best = next(option for option in within if option.cost_s <= least + SAME_S)
        at_home = next((option for option in within if option.region == home.name), best)
        if _goes_home(best, at_home, home, asked):
            best = at_home
    else:
        best = next((option for option in options if option.within_bound), options[0])
    by_name = {region.name: region for region in usable}
    ordered = [*_first(by_name[best.region], usable), *last]
    return _decision(ordered, _reason(best, options, home), candidates)


def _goes_home(best: Option, at_home: Option, home: RegionView, asked: Asked) -> bool:
    """Whether the key's home is taken although `best` is faster.

    A prompt of which `best` holds no more than home does goes home if that is only a little
    farther: edges that cannot know of each other yet agree. A busier home does not get it. One
    that another region holds goes home now and then, the rarer the more it costs, when its
    beginning is hot or its home was lost and is back: a prefix that had to move does not stay
    away for ever, and regions stay evenly loaded.
    """
    extra = at_home.cost_s - best.cost_s
    if best.held_tokens <= at_home.held_tokens:
        idle = at_home.wait_s - best.wait_s <= HOME_WAIT * at_home.read_s
        return idle and extra <= HOME_SLACK * at_home.read_s
    most = HOMING_BACK_S if home.returned else HOMING_S if asked.hot else 0.0
    return asked.draws[0] * extra < most


def _candidates(walk: Sequence[Option]) -> list[Option]:
    """In the order of the walk."""
    near = sorted(walk, key=lambda option: option.round_trip_s)[:NEAREST]
    full = sorted(walk, key=lambda option: -option.held_tokens)[:FULLEST]
    taken = {
        option.region
        for option in (*near, *walk[:FIRST_OF_WALK], *(one for one in full if one.held_tokens))
    }
    return [option for option in walk if option.region in taken]


def _option(region: RegionView, asked: Asked, bound: float) -> Option:
    blocks = region.cache.overlap(asked.ids, region.at) if region.cache and asked.ids else 0
    held = asked.ends[blocks - 1] if blocks else 0
    work = region.work_s
    return Option(
        region=region.name,
        round_trip_s=region.round_trip_s,
        wait_s=region.wait_s,
        read_s=(asked.text_bytes - held) / asked.bytes_per_token / region.reads_per_s(asked.model),
        held_tokens=held / asked.bytes_per_token,
        work_s=work,
        within_bound=work <= bound * region.ramp,
    )


def _reason(best: Option, options: Sequence[Option], home: RegionView) -> Reason:
    if best.region == home.name:
        return Reason.PREFIX_HOME
    at_home = next((option for option in options if option.region == home.name), None)
    if at_home is None or not at_home.within_bound:
        return Reason.PREFIX_SPILL
    return Reason.PREFIX_HELD if best.held_tokens > at_home.held_tokens else Reason.FASTEST


def _short(usable: Sequence[RegionView], asked: Asked) -> list[RegionView]:
    """The faster of two drawn ones first, then the others by distance.

    What has to be read counts as well: a status that still shows the work of a prompt that was
    read a moment ago must not send its next turn to where nobody knows it.
    """
    near = sorted(usable, key=lambda region: region.distance_s)
    one = _drawn(near, asked.draws[0])
    other = _drawn([region for region in near if region is not one] or near, asked.draws[1])

    def cost(region: RegionView) -> tuple[float, float]:
        return _option(region, asked, bound=region.work_s).total_s, region.work_s

    return _first(min(one, other, key=cost), near)


def _drawn(regions: Sequence[RegionView], draw: float) -> RegionView:
    """By weight ÷ distance²: a region ten times as far is drawn a hundred times less."""
    weights = [
        region.weight * region.ramp / (region.distance_s + _FLOOR_S) ** 2 for region in regions
    ]
    left = draw * sum(weights)
    for region, weight in zip(regions, weights, strict=True):
        left -= weight
        if left < 0:
            return region
    return regions[-1]


def _within_bound(usable: Sequence[RegionView], policy: Routing) -> RegionView:
    bound = load_bound_s([region.work_s for region in usable], policy)
    return next((region for region in usable if region.work_s <= bound * region.ramp), usable[0])


def _first(one: RegionView, all_of_them: Sequence[RegionView]) -> list[RegionView]:
    return [one, *(region for region in all_of_them if region is not one)]


def _decision(
    regions: Sequence[RegionView], reason: Reason, options: Sequence[Option] = ()
) -> RouteDecision:
    return RouteDecision(tuple(region.name for region in regions), reason, tuple(options))
