"""What a scenario came to: pure, from the answers of its users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.users.answers import Answer, Slo, Spread
from loadtest.users.shapes import SPIKE_SHARE

REFUSALS = ("429 ", "503 ")
KEPT, RECOVERY_S, RECOVERED, SLOW_SHARE = 0.95, 10.0, 2.0, 0.1
HITS_AFTER = 0.9
SETTLE_S = 5.0
"""After a change, before what is counted as steady."""


@dataclass(frozen=True, slots=True)
class Check:
    what: str
    good: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.good else 'FAIL'}  {self.what}"


def refused(answer: Answer) -> bool:
    """Politely: a status that says so, before the first byte."""
    return answer.error.startswith(REFUSALS)


def spike(answers: Sequence[Answer], slo: Slo, seconds: float) -> list[Check]:
    """Ten times the users from one second to the next, and back."""
    begin, end = (share * seconds for share in SPIKE_SHARE)
    steady = _between(answers, SETTLE_S, begin)
    crowd = _between(answers, begin, end)
    after = _between(answers, end, seconds)
    lost = [one for one in answers if one.error and not refused(one)]
    unsaid = [one for one in answers if refused(one) and one.retry_after_s is None]
    before_s, during_s = begin - SETTLE_S, end - begin
    usual = sum(map(slo.holds, steady)) / before_s if before_s > 0 else 0.0
    kept = sum(map(slo.holds, crowd)) / during_s / usual if usual else 0.0
    recovery = _recovery_s(steady, after, end)
    return [
        Check(f"every request was answered or refused: {len(lost)} were not"
              f" ({_kinds(lost)})", not lost),
        Check(f"every refusal said when to come back: {len(unsaid)} of"
              f" {sum(map(refused, answers))} did not", not unsaid),
        Check(f"goodput during the spike {kept:.2f} of before (wanted {KEPT})", kept >= KEPT),
        Check("the first token was as quick as before"
              + (f" {recovery:.0f} s" if recovery is not None else " never again")
              + f" after the spike (wanted {RECOVERY_S:.0f} s)",
              recovery is not None and recovery <= RECOVERY_S),
    ]  # fmt: skip


def region_loss(answers: Sequence[Answer], at_s: float, region: str, seconds: float) -> list[Check]:
    """A region's processes are killed at `at_s`."""
    broken = [one for one in answers if one.error and _under_way(one, at_s)]
    lost = [one for one in answers if one.error and not _under_way(one, at_s)]
    after = [one for one in _between(answers, at_s + SETTLE_S, seconds) if not one.error]
    there = [one for one in after if one.region == region]
    before_hits = _hits(_between(answers, SETTLE_S, at_s))
    after_hits = _hits(_between(answers, at_s + 2 * SETTLE_S, seconds))
    kept = after_hits / before_hits if before_hits else 1.0
    return [
        Check(f"nothing was lost but answers that had begun there: {len(lost)} were"
              f" ({_kinds(lost)}); {len(broken)} begun ones broke off", not lost),
        Check(f"{len(after) - len(there)} answers came from elsewhere afterwards,"
              f" {len(there)} from there", bool(after) and not there),
        Check(f"share found in caches, {kept:.2f} of before (wanted {HITS_AFTER})",
              kept >= HITS_AFTER),
    ]  # fmt: skip


def _between(answers: Sequence[Answer], begin_s: float, end_s: float) -> list[Answer]:
    return [one for one in answers if begin_s <= one.at_s < end_s]


def _under_way(answer: Answer, at_s: float) -> bool:
    return answer.at_s <= at_s + 1.0 and answer.at_s + answer.total_s >= at_s


def _hits(answers: Sequence[Answer]) -> float:
    prompt = sum(one.prompt_tokens for one in answers)
    return sum(one.cached_tokens for one in answers) / prompt if prompt else 0.0


def _recovery_s(steady: list[Answer], after: list[Answer], end_s: float) -> float | None:
    """From the spike's end until when at most one in ten of all later answers was slow: failed, or
    more than twice the usual p90 to the first token."""
    usual = Spread.of(one.ttft_s for one in steady if one.ttft_s is not None)
    if usual is None or not after:
        return None
    slow = 0
    recovered: float | None = None
    for number, one in enumerate(sorted(after, key=lambda one: -one.at_s), start=1):
        late = one.error or one.ttft_s is None or one.ttft_s > RECOVERED * usual.p90
        slow += bool(late)
        if slow <= SLOW_SHARE * number:
            recovered = one.at_s - end_s
    return recovered


def _kinds(answers: Sequence[Answer]) -> str:
    return ", ".join(sorted({one.error for one in answers})) or "none"
