"""Whether a region has become worse by a rollout, told from what its edges count. Pure.

Compared is the time since the change with two others: the same region before it, and the other
regions meanwhile. Worse is what is worse than both by more than a bound: a rush that slows all
regions down is not the release's fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from core.errors import BY_CODE

_ATTEMPTS = "skerry_edge_attempts_total"
_FIRST = "skerry_edge_first_delta_seconds_bucket"


@dataclass(frozen=True, slots=True)
class Bounds:
    """`errors`: share of answers; `slower`: ratio of the 90th percentiles of first deltas;
    `least`: answers below which nothing is said."""

    errors: float = 0.02
    slower: float = 1.5
    least: int = 10


BOUNDS = Bounds()


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one region at one moment, over all edges, since their starts. `firsts`: how many first
    deltas came within each bound, in seconds, cumulative."""

    answers: int = 0
    errors: int = 0
    firsts: Mapping[float, int] = field(default_factory=dict)

    def since(self, earlier: Counts) -> Counts:
        """What came after `earlier`. An edge that began anew counts from nothing."""
        return Counts(
            max(0, self.answers - earlier.answers),
            max(0, self.errors - earlier.errors),
            {le: max(0, n - earlier.firsts.get(le, 0)) for le, n in self.firsts.items()},
        )

    def plus(self, other: Counts) -> Counts:
        bounds = self.firsts.keys() | other.firsts.keys()
        return Counts(
            self.answers + other.answers,
            self.errors + other.errors,
            {le: self.firsts.get(le, 0) + other.firsts.get(le, 0) for le in bounds},
        )

    @property
    def error_share(self) -> float:
        return self.errors / self.answers if self.answers else 0.0

    def first_p90(self) -> float | None:
        """Seconds, between the bounds of its bucket by even spread; None without any."""
        total = max(self.firsts.values(), default=0)
        if not total:
            return None
        wanted, below, lower = 0.9 * total, 0, 0.0
        for le in sorted(self.firsts):
            count = self.firsts[le]
            if count >= wanted:
                if le == float("inf"):
                    return lower
                return lower + (le - lower) * (wanted - below) / max(1, count - below)
            below, lower = count, le
        return lower


def read(pages: Iterable[bytes]) -> dict[str, Counts]:
    """By region, out of the `/metrics` of every edge."""
    found: dict[str, Counts] = {}
    for page in pages:
        for family in text_string_to_metric_families(page.decode()):
            for sample in family.samples:
                region, number = sample.labels.get("region", ""), int(sample.value)
                if sample.name == _ATTEMPTS:
                    bad = number if _is_our_fault(sample.labels.get("outcome", "")) else 0
                    one = Counts(number, bad)
                elif sample.name == _FIRST:
                    one = Counts(firsts={float(sample.labels["le"]): number})
                else:
                    continue
                found[region] = found.get(region, Counts()).plus(one)
    return found


def others(counts: Mapping[str, Counts], region: str) -> Counts:
    total = Counts()
    for name, one in counts.items():
        if name != region:
            total = total.plus(one)
    return total


def complaint(
    now: Counts, before: Counts, meanwhile: Counts, bounds: Bounds = BOUNDS
) -> str | None:
    """What is worse now, in words; None when nothing is, or too little came to tell."""
    if now.answers < bounds.least:
        return None
    peers = [one for one in (before, meanwhile) if one.answers >= bounds.least]
    usual = max((one.error_share for one in peers), default=0.0)
    if now.error_share > usual + bounds.errors:
        return (
            f"{now.error_share:.1%} of its {now.answers} answers failed, against {usual:.1%} "
            "before and elsewhere"
        )
    p90 = now.first_p90()
    times = [one for one in (peer.first_p90() for peer in peers) if one is not None]
    if p90 is not None and times and p90 > bounds.slower * max(times):
        return (
            f"its first deltas take {p90:.3f} s (90th percentile of {now.answers}), against "
            f"{max(times):.3f} s before and elsewhere"
        )
    return None


def _is_our_fault(outcome: str) -> bool:
    kind = BY_CODE.get(outcome)
    return outcome != "ok" and (kind is None or kind.http_status >= 500)
