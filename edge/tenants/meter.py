"""Does a request fit? Pure: counts in, an answer out.

A minute's limit slides: what was let in during the last sixty seconds counts, in steps of five, so
that no sixty seconds ever see more than the limit, and what was used is free again after sixty to
sixty-five. A day's quota is one fixed window, UTC's, so that a refusal can name the moment of its
end. Steps and days begin at multiples of their length since the epoch: every process agrees where.
A request counts in the step in which it was let in, however long it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from core.config_tenants import Tenant

STEP_S, STEPS = 5, 13
"""Twelve whole steps make a minute; the one that runs comes on top."""
DAY_S = 86_400


class Kind(StrEnum):
    REQUESTS = "requests"
    TOKENS = "tokens"
    DAY = "tokens-day"


@dataclass(frozen=True, slots=True)
class Limit:
    """`amount` in any `span` windows of `window_s` seconds."""

    kind: Kind
    amount: int
    window_s: int
    span: int

    def window(self, now: float) -> int:
        return int(now // self.window_s)

    def ends_s(self, now: float) -> float:
        """Until the next window."""
        return self.window_s - now % self.window_s

    def need(self, tokens: int) -> int:
        return 1 if self.kind is Kind.REQUESTS else tokens


@cache
def limits_of(tenant: Tenant) -> tuple[Limit, ...]:
    """The limits of a tenant over time, the shortest first."""
    wanted = (
        (Kind.REQUESTS, tenant.requests_per_minute, STEP_S, STEPS),
        (Kind.TOKENS, tenant.tokens_per_minute, STEP_S, STEPS),
        (Kind.DAY, tenant.tokens_per_day, DAY_S, 1),
    )
    return tuple(Limit(kind, amount, each, span) for kind, amount, each, span in wanted if amount)


@dataclass(frozen=True, slots=True)
class Meter:
    """One limit now. `counted`: reserved and used in each window that counts, the oldest first,
    and so the present one at the end. `granted`: what may be given out, the limit in all windows
    together or what was leased of it for the present one. `elsewhere`: what was left in the
    shared pot when it was last looked at."""

    counted: list[int]
    granted: int
    elsewhere: int = 0
    leased: bool = False

    @property
    def taken(self) -> int:
        """Of what is granted."""
        return self.counted[-1] if self.leased else sum(self.counted)

    @property
    def free(self) -> int:
        """Below zero where requests needed more than they reserved."""
        return self.granted - self.taken

    @property
    def remaining(self) -> int:
        """What a caller is told it has left."""
        return max(self.free + self.elsewhere, 0)


@dataclass(frozen=True, slots=True)
class Fits:
    """Reserve it."""


@dataclass(frozen=True, slots=True)
class Short:
    """`missing` more of `limit` would have to be granted."""

    limit: Limit
    missing: int


@dataclass(frozen=True, slots=True)
class TooLarge:
    """More than `limit` is at all: it can never pass."""

    limit: Limit


@dataclass(frozen=True, slots=True)
class TooMany:
    """All `streams` of the tenant are open."""

    streams: int


Verdict = Fits | Short | TooLarge | TooMany
FITS = Fits()


def decide(
    limits: Sequence[Limit],
    meters: Mapping[Kind, Meter],
    *,
    tokens: int,
    open_streams: int,
    max_streams: int | None,
) -> Verdict:
    """Whether a request of at most `tokens` may be let in now; all limits or none."""
    if max_streams is not None and open_streams >= max_streams:
        return TooMany(max_streams)
    for limit in limits:
        need = limit.need(tokens)
        if need > limit.amount:
            return TooLarge(limit)
        free = meters[limit.kind].free
        if need > free:
            return Short(limit, need - free)
    return FITS


def frees_s(limit: Limit, meter: Meter, amount: int, now: float) -> float:
    """Seconds until at least `amount` of what is counted here no longer counts. Where less is
    counted, others hold it: until all that counts now is over."""
    gone = 0
    for age, count in enumerate(meter.counted):
        gone += count
        if gone >= amount:
            return age * limit.window_s + limit.ends_s(now)
    return (limit.span - 1) * limit.window_s + limit.ends_s(now)


def clear_s(limit: Limit, meter: Meter, now: float) -> float:
    """Seconds until nothing of what is counted now counts any more."""
    for age in reversed(range(len(meter.counted))):
        if meter.counted[age]:
            return age * limit.window_s + limit.ends_s(now)
    return 0.0
