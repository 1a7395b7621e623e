"""The choice of a region, as a pure function: same view, same request, same answer.

Before anything else, regions outside the residency set do not exist for a request: no hop leaves
it, even when all its regions are dead. Then, in order of precedence:

1. A caller's affinity id takes the place of the prompt: the first region of its ring walk within
   the load bound.
2. A short prompt goes to the faster (round trip + wait + reading) of two regions drawn by weight:
   nearly always the nearest, and never all edges' short prompts at one place.
3. Otherwise the candidates are the two nearest regions, the first two of the prompt key's ring
   walk and the two whose cache digests hold most of the prompt. Of those within the load bound
   the cheapest: round trip + wait + what it would have to read, which weighs more (`weights`).
   If none is within the bound, the first region of the walk that is.

**Load bound**: max(ratio × mean, mean + margin) seconds of work, where work is what a region
publishes plus what this edge has sent there since. A region that comes back has a part of it.

A region where the model is cold, which starts a node for the first request, counts that time as
wait; where a warm one within the bound is sooner, it comes behind those in their full rights.

Regions that drain or lack the model are skipped. Regions whose status is stale, or that failed
several times in a row, come last, whatever the walk says. What follows the first candidate is the
fail-over order: the walk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from core.config import Routing
from core.errors import RegionUnavailable
from core.types import ModelName, RegionName
from edge.routing.view import RegionView
from edge.routing.weights import WEIGHTS, Weights

NEAREST, FIRST_OF_WALK, FULLEST = 2, 2, 2
BYTES_PER_TOKEN = 4.0
"""Until answers have told the true figure of a model."""
SAME_S = 1e-9
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


class Standing(StrEnum):
    """What a region was in one choice, for whoever asks why."""

    TAKEN = "taken"
    WEIGHED = "weighed"
    """Compared with the one that was taken."""
    NOT_DRAWN = "not_drawn"
    """A short prompt weighs two samples; this was none of them."""
    NOT_A_CANDIDATE = "not_a_candidate"
    """Neither near, nor early in the walk, nor known to hold the prompt."""
    FULL = "full"
    """Above the load bound."""
    SUSPECT = "suspect"
    """Its status is stale or its stream is cut: it comes last."""
    FAILING = "failing"
    """Attempts there failed lately: it comes last."""
    COLD = "cold"
    """A node would have to be started first, and another region is sooner."""
    DRAINING = "draining"
    NO_MODEL = "no_model"
    FORBIDDEN = "forbidden"
    """Outside the residency set."""


_OUT = frozenset({Standing.DRAINING, Standing.NO_MODEL, Standing.FORBIDDEN})
_LAST = frozenset({Standing.COLD, Standing.SUSPECT, Standing.FAILING})


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
    """A region as it was weighed for one request: all times in seconds. One that is out of the
    question (draining, without the model, forbidden) was not asked what it holds."""

    region: RegionName
    standing: Standing
    round_trip_s: float
    wait_s: float
    read_s: float
    """For what is not cached there."""
    held_tokens: float
    work_s: float
    within_bound: bool
    cost_s: float
    """What is compared: as `total_s`, but reading weighs more."""

    @property
    def total_s(self) -> float:
        """The predicted time to the first token."""
        return self.round_trip_s + self.wait_s + self.read_s


_Pair = tuple[RegionView, Option]


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """`candidates` in the order to try; `reason` is that of the first. `options`: every region of
    the walk and what it was in this choice, for whoever asks why; `bound_s`: the load bound."""

    candidates: tuple[RegionName, ...]
    reason: Reason
    options: tuple[Option, ...] = field(default=(), compare=False)
    bound_s: float = field(default=0.0, compare=False)

    def of(self, region: RegionName) -> Option | None:
        return next((one for one in self.options if one.region == region), None)

    def work_s(self, region: RegionName) -> float:
        """Seconds of reading that the request brings to `region`."""
        option = self.of(region)
        return option.read_s if option else 0.0


def choose(
    view: Iterable[RegionView], asked: Asked, policy: Routing, weights: Weights = WEIGHTS
) -> RouteDecision:
    """Raises RegionUnavailable when no region can be asked at all."""
    known = {region.name: region for region in view}
    walk = [known[name] for name in asked.walk if name in known]
    stands = [(region, _standing(region, asked)) for region in walk]
    usable = [region for region, standing in stands if standing is Standing.WEIGHED]
    bound = load_bound_s([region.work_s for region in usable], policy)
    options = [_option(region, standing, asked, bound, weights) for region, standing in stands]
    options = _cold_ones_told(options, usable, asked)
    first = [option for option in options if option.standing is Standing.WEIGHED]
    last = [option for option in options if option.standing in _LAST]
    last.sort(key=lambda option: option.standing is not Standing.COLD)
    weighed = {option.region for option in first}
    usable = [region for region in usable if region.name in weighed]
    if not first and not last:
        where = "" if asked.allowed is None else " where this request may go"
        raise RegionUnavailable(
            f"no region serves {asked.model}{where} at the moment", retry_after_s=1.0
        )
    home = next(
        region
        for region, standing in stands
        if standing is not Standing.FORBIDDEN
        and (standing not in _OUT or asked.model in region.configured)
    )
    if not first or asked.by_affinity:
        chosen = _by_walk(first or last, home, asked)
    elif asked.text_bytes < policy.short_prompt_bytes:
        chosen = _by_samples(first, usable, asked)
    else:
        chosen = _by_cost(first, home, asked, weights)
    order = chosen.order if not first else (*chosen.order, *last)
    return RouteDecision(
        tuple(option.region for option in order),
        chosen.reason,
        tuple(_told(option, chosen) for option in options),
        bound,
    )


def load_bound_s(work_s: Sequence[float], policy: Routing) -> float:
    """Seconds of work above which a region takes no more by its place on the ring."""
    mean = sum(work_s) / len(work_s) if work_s else 0.0
    return max(policy.load_ratio * mean, mean + policy.load_margin_s)


def _standing(region: RegionView, asked: Asked) -> Standing:
    """Before anything is weighed."""
    if asked.allowed is not None and region.name not in asked.allowed:
        return Standing.FORBIDDEN
    if region.draining:
        return Standing.DRAINING
    if not region.serves(asked.model):
        return Standing.NO_MODEL
    if not region.fresh:
        return Standing.SUSPECT
    return Standing.FAILING if region.broken else Standing.WEIGHED


def _option(
    region: RegionView, standing: Standing, asked: Asked, bound: float, weights: Weights
) -> Option:
    asks = region.cache is not None and standing not in _OUT and asked.ids
    blocks = region.cache.overlap(asked.ids, region.at) if asks and region.cache else 0
    held = asked.ends[blocks - 1] if blocks else 0
    work, trip_s = region.work_s, region.round_trip_s
    wait_s = region.wait_s + region.start_s(asked.model)
    unread = (asked.text_bytes - held) / asked.bytes_per_token
    read_s = unread / region.reads_per_s(asked.model)
    return Option(
        region=region.name,
        standing=standing,
        round_trip_s=trip_s,
        wait_s=wait_s,
        read_s=read_s,
        held_tokens=held / asked.bytes_per_token,
        work_s=work,
        within_bound=work <= bound * region.ramp,
        cost_s=trip_s + wait_s + weights.read * read_s,
    )


def _cold_ones_told(
    options: Sequence[Option], usable: Sequence[RegionView], asked: Asked
) -> list[Option]:
    """The same, where those are cold that a warm one beats."""
    cold = {region.name for region in usable if region.start_s(asked.model)}
    if not cold:
        return list(options)
    soonest_s = min(
        (
            option.total_s
            for option in options
            if option.standing is Standing.WEIGHED
            and option.within_bound
            and option.region not in cold
        ),
        default=float("inf"),
    )
    return [
        replace(option, standing=Standing.COLD)
        if option.region in cold and option.total_s > soonest_s
        else option
        for option in options
    ]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """`order`: what to try, the taken one first. `others`: what the not weighed ones were."""

    order: tuple[Option, ...]
    reason: Reason
    weighed: tuple[Option, ...] = ()
    others: Standing = Standing.NOT_A_CANDIDATE


def _told(option: Option, chosen: _Chosen) -> Option:
    """With what it turned out to be."""
    if option is chosen.order[0]:
        return replace(option, standing=Standing.TAKEN)
    if option.standing is not Standing.WEIGHED:
        return option
    if chosen.others is not Standing.NOT_DRAWN and not option.within_bound:
        return replace(option, standing=Standing.FULL)
    weighed = any(option is one for one in chosen.weighed)
    return option if weighed else replace(option, standing=chosen.others)


def _by_walk(possible: Sequence[Option], home: RegionView, asked: Asked) -> _Chosen:
    """The first within the bound: for an affinity id, or when nobody is in his full rights."""
    usable = possible[0].standing is Standing.WEIGHED
    taken = possible[0]
    if usable:
        taken = next((option for option in possible if option.within_bound), taken)
    at_home = taken.region == home.name
    if asked.by_affinity:
        reason = Reason.AFFINITY if at_home else Reason.AFFINITY_SPILL
    else:
        reason = Reason.PREFIX_HOME if at_home else Reason.PREFIX_SPILL
    return _Chosen(_first(taken, possible), reason)


def _by_cost(usable: Sequence[Option], home: RegionView, asked: Asked, weights: Weights) -> _Chosen:
    candidates = _candidates(usable)
    within = [option for option in candidates if option.within_bound]
    if within:
        least = min(option.cost_s for option in within)
        best = next(option for option in within if option.cost_s <= least + SAME_S)
        at_home = next((option for option in within if option.region == home.name), best)
        if _goes_home(best, at_home, home, asked, weights):
            best = at_home
    else:
        best = next((option for option in usable if option.within_bound), usable[0])
    return _Chosen(_first(best, usable), _reason(best, usable, home), tuple(candidates))


def _goes_home(
    best: Option, at_home: Option, home: RegionView, asked: Asked, weights: Weights
) -> bool:
    """Whether the key's home is taken although `best` is faster.

    A prompt of which `best` holds no more than home does goes home if that is only a little
    farther: edges that cannot know of each other yet agree. One that another region holds goes
    home now and then, the rarer the more it costs, when its beginning is hot or its home was lost
    and is back: a prefix that had to move does not stay away for ever, and regions stay evenly
    loaded.
    """
    extra = at_home.cost_s - best.cost_s
    if best.held_tokens <= at_home.held_tokens:
        return extra <= weights.home_slack * at_home.read_s
    most = weights.homing_back_s if home.returned else weights.homing_s if asked.hot else 0.0
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


def _reason(best: Option, options: Sequence[Option], home: RegionView) -> Reason:
    if best.region == home.name:
        return Reason.PREFIX_HOME
    at_home = next((option for option in options if option.region == home.name), None)
    if at_home is None or not at_home.within_bound:
        return Reason.PREFIX_SPILL
    return Reason.PREFIX_HELD if best.held_tokens > at_home.held_tokens else Reason.FASTEST


def _by_samples(usable: Sequence[Option], views: Sequence[RegionView], asked: Asked) -> _Chosen:
    """The faster of two drawn ones first, then the others by distance.

    What has to be read counts as well: a status that still shows the work of a prompt that was
    read a moment ago must not send its next turn to where nobody knows it.
    """
    near = sorted(zip(views, usable, strict=True), key=_distance_s)
    one = _drawn(near, asked.draws[0])
    other = _drawn([pair for pair in near if pair is not one] or near, asked.draws[1])
    taken = min(one[1], other[1], key=lambda option: (option.total_s, option.work_s))
    return _Chosen(
        _first(taken, [option for _, option in near]),
        Reason.NEAREST_SHORT,
        (one[1], other[1]),
        Standing.NOT_DRAWN,
    )


def _distance_s(pair: _Pair) -> float:
    """What the request waits before the region begins with it."""
    return pair[1].round_trip_s + pair[1].wait_s


def _drawn(near: Sequence[_Pair], draw: float) -> _Pair:
    """By weight ÷ distance²: a region ten times as far is drawn a hundred times less."""
    weights = [pair[0].weight * pair[0].ramp / (_distance_s(pair) + _FLOOR_S) ** 2 for pair in near]
    left = draw * sum(weights)
    for pair, weight in zip(near, weights, strict=True):
        left -= weight
        if left < 0:
            return pair
    return near[-1]


def _first(one: Option, all_of_them: Sequence[Option]) -> tuple[Option, ...]:
    return (one, *(option for option in all_of_them if option is not one))
