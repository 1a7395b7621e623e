"""The circuit breaker in virtual time."""

from __future__ import annotations

import pytest

from edge.routing.breaker import (
    FAILURES,
    FIRST_PAUSE_S,
    FORGIVE_S,
    LONGEST_PAUSE_S,
    TRIAL_S,
    TRIALS,
    Breaker,
    State,
)


def _opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        assert not breaker.open(now)
        breaker.failed(now)
    return breaker


def _closed_again(breaker: Breaker, now: float) -> None:
    for _ in range(TRIALS):
        breaker.sent(now)
        breaker.succeeded()
    assert breaker.state(now) is State.CLOSED


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker()
    for _ in range(5):
        for _ in range(FAILURES - 1):
            breaker.failed(0.0)
        breaker.succeeded()
    assert breaker.state(0.0) is State.CLOSED
    assert _opened().open(FIRST_PAUSE_S - 0.01)


def test_after_the_pause_one_is_on_trial_and_the_others_stay_away() -> None:
    breaker = _opened()
    assert not breaker.open(1.0)
    breaker.sent(1.0)
    assert breaker.state(1.0) is State.HALF_OPEN
    assert breaker.open(1.1)
    breaker.succeeded()
    assert not breaker.open(1.2)
    breaker.sent(1.2)
    assert not breaker.open(1.2)  # one came back well: two may be under way
    breaker.sent(1.2)
    assert breaker.open(1.3)
    breaker.succeeded()
    assert breaker.state(1.3) is State.CLOSED
    assert not breaker.open(1.3)


def test_a_failed_trial_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    breaker, now, pauses = _opened(), 0.0, []
    for _ in range(6):
        began = now
        while breaker.open(now):
            now += 0.5
        pauses.append(now - began)
        breaker.sent(now)
        breaker.failed(now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_what_was_sent_before_it_opened_does_not_prolong_the_pause() -> None:
    breaker = _opened()
    for _ in range(10):
        breaker.failed(0.5)
    assert not breaker.open(FIRST_PAUSE_S)


@pytest.mark.parametrize(("after_s", "pause_s"), [(1.0, 2.0), (FORGIVE_S + 1.0, 1.0)])
def test_a_relapse_soon_after_recovery_weighs_more(after_s: float, pause_s: float) -> None:
    breaker = _opened()
    assert not breaker.open(1.0)
    _closed_again(breaker, 1.0)
    now = 1.0 + after_s
    for _ in range(FAILURES):
        breaker.failed(now)
    assert breaker.open(now + pause_s - 0.1)
    assert not breaker.open(now + pause_s)


def test_a_trial_that_never_comes_back_or_is_refused_blocks_nobody() -> None:
    breaker = _opened()
    breaker.sent(1.0)
    assert breaker.open(TRIAL_S)
    assert not breaker.open(1.0 + TRIAL_S + 0.1)
    breaker.sent(20.0)
    breaker.passed()
    assert not breaker.open(20.0)
    assert breaker.state(20.0) is State.HALF_OPEN
