"""Verdicts of scenarios, each from answers that are to pass it and from ones that are not."""

from __future__ import annotations

import msgspec

from loadtest.users.answers import Slo
from loadtest.users.verdicts import region_loss, spike
from tests.loadtest.users.test_answers import GOOD, but

SLO = Slo(ttft_s=1.0, per_token_s=0.1)


def _spike(crowd_good: int, *, polite: bool = True, slow_until: float = 62.0) -> list[bool]:
    """100 s: one good answer a second, forty refusals a second during the spike."""
    answers = [but(at_s=float(n)) for n in range(5, 40)]
    answers += [but(at_s=40 + n / crowd_good) for n in range(20 * crowd_good)]
    answers += [
        but(at_s=40 + n / 40, error="429 no_capacity" if polite else "cut", ttft_s=None,
            retry_after_s=2.0)
        for n in range(800)
    ]  # fmt: skip
    answers += [but(at_s=float(n), ttft_s=5.0 if n < slow_until else 0.5) for n in range(60, 100)]
    return [check.good for check in spike(answers, SLO, 100.0)]


def test_a_spike_that_is_borne() -> None:
    assert _spike(1) == [True, True, True, True]


def test_a_spike_that_is_not() -> None:
    assert _spike(1, polite=False)[0] is False
    assert _spike(1, slow_until=90.0)[3] is False
    answers = [but(at_s=float(n)) for n in range(5, 40)]
    assert spike(answers, SLO, 100.0)[2].good is False, "nothing good came during the spike"
    unsaid = [*answers, but(at_s=50.0, error="429 no_capacity", ttft_s=None)]
    assert spike(unsaid, SLO, 100.0)[1].good is False


def test_a_lost_region() -> None:
    before = [but(at_s=float(n), region="eu") for n in range(40)]
    begun = but(at_s=39.5, total_s=2.0, error="cut", region="eu")
    after = [but(at_s=float(n), region="us") for n in range(41, 100)]
    assert all(c.good for c in region_loss([*before, begun, *after], 40.0, "eu", 100.0))
    lost = but(at_s=70.0, error="503 region_unavailable")
    assert region_loss([*before, *after, lost], 40.0, "eu", 100.0)[0].good is False
    still = [msgspec.structs.replace(one, region="eu") for one in after]
    assert region_loss([*before, *still], 40.0, "eu", 100.0)[1].good is False
    cold = [msgspec.structs.replace(one, cached_tokens=0) for one in after]
    assert region_loss([*before, *cold], 40.0, "eu", 100.0)[2].good is False
    assert GOOD.cached_tokens > 0
