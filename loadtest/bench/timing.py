"""Rates out of the times at which tokens came: pure, and the same for every contestant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

Times = Sequence[Sequence[float]]
"""For each request the seconds at which its tokens came, counted from the start of the play."""


def steady(times: Times) -> float:
    """Tokens a second while all requests decode: from the last one's first token until the first
    one has its last. Raises ValueError when there is no such span."""
    start = max(request[0] for request in times)
    end = min(request[-1] for request in times)
    tokens = sum(start < at <= end for request in times for at in request)
    if end <= start or not tokens:
        raise ValueError("the requests never decoded all together")
    return tokens / (end - start)


def throughput(times: Times) -> float:
    """Tokens a second over the whole play."""
    return sum(len(request) for request in times) / max(request[-1] for request in times)


def gaps(times: Times) -> list[float]:
    """Seconds between one token of a request and its next."""
    return [later - earlier for request in times for earlier, later in pairwise(request)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
