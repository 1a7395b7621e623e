"""Figures of one simulated run: pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadtest.simulator.traces import Request, infinite_hit
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


def summary(result: Result) -> Summary:
    answered = [one for one in result.outcomes if one.answered]
    times = sorted(one.ttft_s for one in answered)
    hit = hit_of(result.outcomes)
    served, count = list(result.served.values()), len(result.outcomes)
    return Summary(
        hit=hit,
        hit_of_infinite=hit / infinite_hit([one.request for one in result.outcomes]),
        mean_ttft_s=sum(times) / len(times),
        p99_ttft_s=times[min(len(times) - 1, int(0.99 * len(times)))],
        busiest=max(served) / (sum(served) / len(served)),
        spilled=result.reasons["prefix_spill"] / count,
        far=1 - result.reasons["prefix_home"] / count,
        moved_keys=result.moved_keys,
        hot_peak=result.hot_peak,
        lost=count - len(answered),
        cut=sum(one.cut for one in result.outcomes),
    )


def hit_of(outcomes: Iterable[Outcome]) -> float:
    cached = total = 0
    for one in outcomes:
        if one.answered:
            cached += one.cached
            total += one.request.tokens
    return cached / total if total else 0.0


def recovery(result: Result, requests: Sequence[Request]) -> float:
    """Hit ratio in the five minutes that begin a minute after the return, over that in the five
    before the loss, each against one infinite cache over the same requests: a trace's own share of
    repeats rises and falls."""
    fails = result.setup.fails
    if fails is None:
        raise ValueError("nothing failed in this run")
    _, lost_at, for_s = fails
    back_at = lost_at + for_s + SETTLED_S

    def against_infinite(since: float, until: float) -> float:
        span = [one for one in result.outcomes if since <= one.at_s < until]
        return hit_of(span) / infinite_hit(requests, since, until)

    return against_infinite(back_at, back_at + SPAN_S) / against_infinite(lost_at - SPAN_S, lost_at)
