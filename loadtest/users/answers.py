"""What one request came to, and what many of them come to. Pure.

Times to the first token run from the moment at which a request was due, not from when a busy client
got round to sending it: otherwise a slow server slows its own measurement down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`ttft_s` is None where no piece came. `per_token_s`: from the first piece to the last, over
    the tokens after the first. `error` is empty for a whole answer."""

    kind: str
    edge: str
    region: str
    error: str
    at_s: float
    """When it was due, since the start of the test."""
    ttft_s: float | None
    per_token_s: float | None
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    retry_after_s: float | None = None
    """What a refusal said about when to come back."""
    comments: int = 0
    """SSE comments before the first piece: signs of life while a request waits."""


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer is good when it is within both; the run is when `share` of all are."""

    ttft_s: float = 2.0
    per_token_s: float = 0.2
    share: float = 0.95

    def holds(self, answer: Answer) -> bool:
        return (
            not answer.error
            and answer.ttft_s is not None
            and answer.ttft_s <= self.ttft_s
            and (answer.per_token_s is None or answer.per_token_s <= self.per_token_s)
        )


@dataclass(frozen=True, slots=True)
class Spread:
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """By nearest rank; None of nothing."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(
            *(ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.5, 0.9, 0.99))
        )


@dataclass(frozen=True, slots=True)
class Group:
    """A row of the summary."""

    name: str
    requests: int
    failed: int
    good: int
    ttft: Spread | None
    per_token: Spread | None
    cached_share: float | None
    tokens: int

    @property
    def good_share(self) -> float:
        return self.good / self.requests if self.requests else 0.0


def group(name: str, answers: Sequence[Answer], slo: Slo) -> Group:
    whole = [one for one in answers if not one.error]
    prompt = sum(one.prompt_tokens for one in whole)
    cached = sum(one.cached_tokens for one in whole)
    return Group(
        name=name,
        requests=len(answers),
        failed=len(answers) - len(whole),
        good=sum(slo.holds(one) for one in answers),
        ttft=Spread.of(one.ttft_s for one in whole if one.ttft_s is not None),
        per_token=Spread.of(one.per_token_s for one in whole if one.per_token_s is not None),
        cached_share=cached / prompt if prompt else None,
        tokens=sum(one.completion_tokens for one in answers),
    )


def groups(answers: Sequence[Answer], slo: Slo) -> list[Group]:
    """All together, then by kind, by edge and by region."""
    found = [group("all", answers, slo)]
    for key in ("kind", "edge", "region"):
        names = sorted({getattr(one, key) or "–" for one in answers})
        if key != "kind" and len(names) < 2:
            continue
        found += [
            group(f"{key} {name}", [a for a in answers if (getattr(a, key) or "–") == name], slo)
            for name in names
        ]
    return found


def errors(answers: Sequence[Answer]) -> list[tuple[str, int]]:
    """By kind, the most frequent first."""
    return Counter(one.error for one in answers if one.error).most_common()


def verdict(answers: Sequence[Answer], slo: Slo) -> tuple[bool, str]:
    """Whether the run was good, and why."""
    if not answers:
        return False, "no request was sent"
    all_ = group("all", answers, slo)
    words = (
        f"{all_.good_share:.1%} of {all_.requests} requests within {slo.ttft_s:g} s to the first"
        f" token and {slo.per_token_s * 1000:g} ms a token (wanted: {slo.share:.0%})"
    )
    return all_.good_share >= slo.share, words


def lines(answers: Sequence[Answer], slo: Slo, seconds: float) -> list[str]:
    """For a terminal."""
    rows = table(answers, slo, seconds)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    shown = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    failed = [f"  {count:>6}  {name}" for name, count in errors(answers)]
    _, words = verdict(answers, slo)
    return [*shown, *(["errors:", *failed] if failed else []), words]


def table(answers: Sequence[Answer], slo: Slo, seconds: float) -> list[tuple[str, ...]]:
    """Heads, and a row for each group. good/s is the goodput: answers within the service level."""
    head = ("", "requests", "failed", "good", "TTFT p50", "p90", "p99",
            "ms/token p50", "p90", "p99", "cached", "good/s", "tok/s")  # fmt: skip
    return [head, *(_row(one, seconds) for one in groups(answers, slo))]


def _row(one: Group, seconds: float) -> tuple[str, ...]:
    def three(spread: Spread | None, factor: float, digits: int) -> tuple[str, ...]:
        if spread is None:
            return ("–", "–", "–")
        return tuple(f"{v * factor:.{digits}f}" for v in (spread.p50, spread.p90, spread.p99))

    return (
        one.name,
        str(one.requests),
        str(one.failed),
        f"{one.good_share:.1%}",
        *three(one.ttft, 1.0, 3),
        *three(one.per_token, 1000.0, 1),
        "–" if one.cached_share is None else f"{one.cached_share:.1%}",
        f"{one.good / seconds:.2f}" if seconds > 0 else "–",
        f"{one.tokens / seconds:.0f}" if seconds > 0 else "–",
    )
