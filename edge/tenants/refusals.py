"""A verdict in words: the refusal of a request, and the headers that say what is left."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping

from core.errors import QuotaExceeded, RequestError
from core.errors import RateLimited as TooMuch
from edge.tenants.meter import (
    Fits,
    Kind,
    Limit,
    Meter,
    Short,
    TooLarge,
    TooMany,
    Verdict,
    clear_s,
    frees_s,
)

_NAMES = {
    kind: tuple(f"x-ratelimit-{what}-{kind}".encode() for what in ("limit", "remaining", "reset"))
    for kind in Kind
}
STREAM_RETRY_S = 1.0
"""Nobody knows when one of the tenant's own requests ends."""


def refusal(verdict: Verdict, meters: Mapping[Kind, Meter], now: float) -> RequestError:
    """`QuotaExceeded` is about a day, `RateLimited` about what passes sooner."""
    assert not isinstance(verdict, Fits), "what fits is not refused"
    if isinstance(verdict, TooMany):
        return TooMuch(
            f"All {verdict.streams} requests that this tenant may have in flight are running.",
            retry_after_s=STREAM_RETRY_S,
        )
    limit = verdict.limit
    kind = QuotaExceeded if limit.kind is Kind.DAY else TooMuch
    if isinstance(verdict, TooLarge):
        return kind(
            f"This request may take more tokens than the tenant's {_words(limit)} allows at all;"
            " ask for a shorter answer.",
        )
    meter = meters[limit.kind]
    left = meter.remaining
    needs = "" if limit.kind is Kind.REQUESTS else f"; this request may take {_need(verdict, left)}"
    frees = frees_s(limit, meter, verdict.missing, now)
    then = "It begins again at" if limit.kind is Kind.DAY else "There is room for it at"
    return kind(
        f"The tenant's {_words(limit)} is used: {left} left{needs}. {then} {_moment(now + frees)}.",
        retry_after_s=frees,
    )


def limit_headers(
    limits: Iterable[Limit], meters: Mapping[Kind, Meter], now: float
) -> Iterator[tuple[bytes, bytes]]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens,tokens-day}`; reset, until nothing is
    used any more, as OpenAI writes it, in seconds with their unit."""
    for limit in limits:
        meter = meters.get(limit.kind)
        if meter is not None:
            whole, remaining, reset = _NAMES[limit.kind]
            yield whole, b"%d" % limit.amount
            yield remaining, b"%d" % meter.remaining
            yield reset, b"%ds" % math.ceil(clear_s(limit, meter, now))


def _words(limit: Limit) -> str:
    if limit.kind is Kind.REQUESTS:
        return f"limit of {limit.amount} requests a minute"
    if limit.kind is Kind.TOKENS:
        return f"limit of {limit.amount} tokens a minute"
    return f"quota of {limit.amount} tokens a day"


def _need(verdict: Short, left: int) -> int:
    return left + verdict.missing


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
