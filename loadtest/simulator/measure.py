"""Figures of one simulated run: pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from edge.routing.placement import Reason
from loadtest.simulator.traces import infinite_hit
from loadtest.simulator.world import Outcome, Result

SETTLED_S = 60.0
"""After a region's return, before its caches are judged."""
SPAN_S = 300.0


@dataclass(frozen=True, slots=True)
class Summary:
    hit: float
    """Prompt tokens that were not computed, of all."""
    hit_of_infinite: float
    mean_ttft_s: float
    p99_ttft_s: float
    busiest: float
    """Requests of the busiest region over the mean."""
    spilled: float
    """Share of requests that their key's home did not get because it was full or out."""
    far: float
    """Share of requests that their key's home did not get, for whatever reason."""
    moved_keys: int
    hot_peak: int
    lost: int
    """Neither answered nor told so."""
    cut: int
    """Ended by an error event in the middle of an answer."""


def summary(result: Result, since_s: float = 0.0, until_s: float = math.inf) -> Summary:
    """Of the requests in a span of the trace's own time."""
    asked = [one.request for one in result.outcomes]
    outcomes = [one for one in result.outcomes if since_s <= one.request.at_s < until_s]
    answered = [one for one in outcomes if one.answered]
    times = sorted(one.ttft_s for one in answered)
    hit, count = hit_of(outcomes), len(outcomes)
    served = Counter(one.region for one in answered)
    reasons = Counter(one.reason for one in outcomes)
    return Summary(
        hit=hit,
        hit_of_infinite=hit / infinite_hit(asked, since_s, until_s),
        mean_ttft_s=sum(times) / len(times),
        p99_ttft_s=times[min(len(times) - 1, int(0.99 * len(times)))],
        busiest=max(served.values()) * len(result.sites) / len(answered),
        spilled=reasons[Reason.PREFIX_SPILL] / count,
        far=1 - reasons[Reason.PREFIX_HOME] / count,
        moved_keys=sum(one.moved for one in outcomes),
        hot_peak=result.hot_peak,
        lost=count - len(answered),
        cut=sum(one.cut for one in outcomes),
    )


def hit_of(outcomes: Iterable[Outcome]) -> float:
    cached = total = 0
    for one in outcomes:
        if one.answered:
            cached += one.cached
            total += one.request.tokens
    return cached / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """Of one loss: hits in the five minutes that begin a minute after the return, each time
    against one infinite cache over the same requests."""

    of_before: float
    """Over those of the five minutes before the loss. A trace's own share of repeats that fit a
    cache rises and falls, with or without a loss."""
    of_undisturbed: float
    """Over those of the same minutes in a world that lost nothing."""


def recovery(result: Result, undisturbed: Result) -> Recovery:
    fails = result.setup.fails
    if fails is None:
        raise ValueError("nothing failed in this run")
    _, lost_at, for_s = fails
    back_at = lost_at + for_s + SETTLED_S
    after = _against_infinite(result, back_at, back_at + SPAN_S)
    return Recovery(
        after / _against_infinite(result, lost_at - SPAN_S, lost_at),
        after / _against_infinite(undisturbed, back_at, back_at + SPAN_S),
    )


def _against_infinite(result: Result, since_s: float, until_s: float) -> float:
    span = [one for one in result.outcomes if since_s <= one.at_s < until_s]
    return hit_of(span) / infinite_hit((one.request for one in result.outcomes), since_s, until_s)
