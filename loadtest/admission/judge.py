"""Do ledgers and callers agree? Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from core.types import Usage
from core.usage import UsageRecord
from loadtest.admission.traffic import Seen


@dataclass(frozen=True, slots=True)
class Verdict:
    requests: int
    answered: int
    """Whose callers received a usage."""
    refused: int
    left: int
    """By their callers, on purpose."""
    cut: int
    """By a process that died."""
    matched: int
    """Answered, and the ledger says the same of them."""
    sent: int
    """Tokens that callers were told of."""
    written: int
    """The same requests' tokens in the ledger."""
    unheard: int
    """Written as whole, not received, though nobody left and nothing was cut."""
    records: int
    """Requests that are written down."""
    twice: int
    """Requests with more than one record."""


def judge(seen: Iterable[Seen], records: Iterable[UsageRecord]) -> Verdict:
    by_id: dict[str, UsageRecord] = {}
    twice = 0
    for record in records:
        twice += record.id in by_id
        by_id[record.id] = record
    asked = list(seen)
    answered = [one for one in asked if one.usage is not None]
    written = [_written(by_id, one) for one in answered]
    broken = {one.request_id for one in asked if one.usage is None}
    heard = {one.request_id for one in answered}
    cut = [one for one in asked if one.usage is None and not one.left and one.status in (0, 200)]
    unknown = sum(one.status == 0 for one in cut)  # died before they knew their own id
    whole = [record for record in by_id.values() if record.complete]
    unheard = [one for one in whole if one.id not in heard and one.id not in broken]
    return Verdict(
        requests=len(asked),
        answered=len(answered),
        refused=sum(one.status == 429 for one in asked),
        left=sum(one.left for one in asked),
        cut=len(cut),
        matched=sum(usage == one.usage for usage, one in zip(written, answered, strict=True)),
        sent=sum(_tokens(one.usage) for one in answered),
        written=sum(_tokens(usage) for usage in written),
        unheard=max(0, len(unheard) - unknown),
        records=len(by_id),
        twice=twice,
    )


def _written(by_id: Mapping[str, UsageRecord], one: Seen) -> Usage | None:
    record = by_id.get(one.request_id)
    return record.usage if record is not None and record.complete else None


def _tokens(usage: Usage | None) -> int:
    return 0 if usage is None else usage.prompt_tokens + usage.completion_tokens
