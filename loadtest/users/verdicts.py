"""What a scenario came to: pure, from the answers of its users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.users.answers import Answer, Slo, Spread
from loadtest.users.shapes import SPIKE_SHARE

REFUSALS = ("429 ", "503 ")
KEPT, RECOVERY_S, RECOVERED, SLOW_SHARE = 0.95, 10.0, 2.0, 0.1
HITS_AFTER = 0.9
SETTLE_S = 5.0
"""After a change, before what is counted as steady."""
DEPLOY_SLOWER, DEPLOY_SLOWER_S = 2.0, 1.0
"""TTFT p90 while processes are replaced: so many times that of before, and so much more: one region
does the work of two and reads what the other knew, on cores that load models at the same time."""
COLD_S = 1.0
"""What the first answer of a cold model may take beyond the start of a node."""
COMMENT_S = 10.0
"""Of silence, after which an edge sends an SSE comment."""


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


@dataclass(frozen=True, slots=True)
class Deployed:
    """When, in seconds of the test, and what told the processes apart before and afterwards."""

    began_s: float
    ended_s: float
    before: Mapping[str, str]
    after: Mapping[str, str]


def rolling_deploy(answers: Sequence[Answer], deployed: Deployed, seconds: float) -> list[Check]:
    """Every process of the world is replaced while its users stream."""
    failed = [one for one in answers if one.error and one.ttft_s is None]
    broken = [one for one in answers if one.error and one.ttft_s is not None]
    meanwhile = _between(answers, deployed.began_s, deployed.ended_s)
    kept = [name for name, one in deployed.before.items() if deployed.after.get(name) == one]
    before = _p90(_between(answers, SETTLE_S, deployed.began_s))
    during = _p90(meanwhile)
    after = _p90(_between(answers, deployed.ended_s + SETTLE_S, seconds))
    bound = DEPLOY_SLOWER * before + DEPLOY_SLOWER_S
    took_s = deployed.ended_s - deployed.began_s
    return [
        Check(f"no request failed: {len(failed)} of {len(answers)} did ({_kinds(failed)})",
              bool(answers) and not failed),
        Check(f"no stream broke: {len(broken)} of {len(answers)} did ({_kinds(broken)})",
              not broken),
        Check(f"{len(deployed.before) - len(kept)} processes of {len(deployed.before)} were"
              f" replaced in {took_s:.0f} s, under {len(meanwhile)} requests"
              + (f"; not {', '.join(kept)}" if kept else ""), bool(meanwhile) and not kept),
        Check(f"TTFT p90 meanwhile {during:.2f} s, {before:.2f} s before (wanted {bound:.2f} s:"
              f" {DEPLOY_SLOWER:g} times and {DEPLOY_SLOWER_S:g} s)", 0 < during <= bound),
        Check(f"TTFT p90 afterwards {after:.2f} s (wanted {bound:.2f} s)", 0 < after <= bound),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cold:
    """Three times users come to a model that has no node: few of them; more than there is room for
    (`room` requests); and where another region is warm. Answers are of each run, from when the
    users came. `start_s`: of the first run's node."""

    few: Sequence[Answer]
    crowd: Sequence[Answer]
    beside_warm: Sequence[Answer]
    start_s: float
    room: int
    cold: str
    warm: str


def cold_model(told: Cold) -> list[Check]:
    """Nobody asked, no node ran, and then users come."""
    lost = [one for one in told.few if one.error]
    first = min(told.few, key=lambda one: one.at_s, default=None)
    first_s = None if first is None else first.ttft_s
    most_s = told.start_s + COLD_S
    rude = [one for one in told.crowd if one.error and not _politely(one)]
    refusals = [one for one in told.crowd if refused(one)]
    waited = [one for one in told.crowd if not one.error and (one.ttft_s or 0) > COMMENT_S + 1]
    silent = [one for one in waited if not one.comments]
    arrived = _between(told.beside_warm, 0.0, _begin(told.beside_warm) + told.start_s / 2)
    spilt = [one for one in arrived if one.region == told.warm and not one.error]
    late = [one for one in arrived if (one.ttft_s or told.start_s) >= told.start_s]
    return [
        Check(f"every request was answered: {len(lost)} of {len(told.few)} were not"
              f" ({_kinds(lost)})", bool(told.few) and not lost),
        Check(f"the first one after {'–' if first_s is None else f'{first_s:.2f}'} s (wanted"
              f" {most_s:.2f} s: a node starts in {told.start_s:.2f} s)",
              first_s is not None and first_s <= most_s),
        Check(f"of {len(told.crowd)} requests of a crowd {len(refusals)} were refused, with"
              f" Retry-After, and {len(rude)} otherwise ({_kinds(rude)}); there is room for"
              f" {told.room}", bool(refusals) and not rude
              and len(told.crowd) - len(refusals) >= told.room),
        Check(f"{len(waited)} answers came after {COMMENT_S:.0f} s of waiting, {len(silent)} of"
              " them without a comment meanwhile", bool(waited) and not silent),
        Check(f"{len(spilt)} of the first {len(arrived)} requests went to the warm {told.warm},"
              f" {len(late)} took as long as a start in {told.cold}",
              bool(arrived) and len(spilt) == len(arrived) and not late),
    ]  # fmt: skip


def _politely(answer: Answer) -> bool:
    return refused(answer) and answer.retry_after_s is not None


def _begin(answers: Sequence[Answer]) -> float:
    return min((one.at_s for one in answers), default=0.0)


def _p90(answers: Sequence[Answer]) -> float:
    """To the first token, in seconds; 0 of nothing."""
    spread = Spread.of(one.ttft_s for one in answers if one.ttft_s is not None)
    return spread.p90 if spread else 0.0


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
