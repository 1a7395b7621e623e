"""Does a request fit? Pure: counts in, an answer out.

A limit counts in fixed windows of the clock, minutes and UTC days, so that every process agrees
where one begins and a refusal can say when the next one does. A request counts in the windows in
which it was let in, however long it runs. Over a window's border twice a minute's limit can pass
within sixty seconds: that is the price of a count that needs no history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from core.config_tenants import Tenant

MINUTE_S, DAY_S = 60, 86_400


class Kind(StrEnum):
    REQUESTS = "requests"
    TOKENS = "tokens"
    DAY = "tokens-day"


@dataclass(frozen=True, slots=True)
class Limit:
    kind: Kind
    amount: int
    period_s: int

    def window(self, now: float) -> int:
        return int(now // self.period_s)

    def resets_s(self, now: float) -> float:
        """Until the next window."""
        return self.period_s - now % self.period_s

    def need(self, tokens: int) -> int:
        return 1 if self.kind is Kind.REQUESTS else tokens


def limits_of(tenant: Tenant) -> tuple[Limit, ...]:
    """The windowed limits of a tenant, the shortest first."""
    wanted = (
        (Kind.REQUESTS, tenant.requests_per_minute, MINUTE_S),
        (Kind.TOKENS, tenant.tokens_per_minute, MINUTE_S),
        (Kind.DAY, tenant.tokens_per_day, DAY_S),
    )
    return tuple(Limit(kind, amount, period) for kind, amount, period in wanted if amount)


@dataclass(frozen=True, slots=True)
class Meter:
    """One limit in one window. `granted`: what this ledger may give out, the limit or what was
    leased of it. `elsewhere`: what was left in the shared pot when it was last looked at."""

    granted: int = 0
    elsewhere: int = 0
    used: int = 0
    reserved: int = 0

    @property
    def free(self) -> int:
        """Below zero where requests needed more than they reserved."""
        return self.granted - self.used - self.reserved

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
    """More than a whole window of `limit`: it can never pass."""

    limit: Limit


@dataclass(frozen=True, slots=True)
class TooMany:
    """All `streams` of the tenant are open."""

    streams: int


Verdict = Fits | Short | TooLarge | TooMany


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
    return Fits()
