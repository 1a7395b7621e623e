"""Slow start, flapping, own sends and round trips: all in virtual time."""

from __future__ import annotations

import pytest

from edge.routing.health import (
    RAMP_FIRST,
    RAMP_S,
    TRIP_WINDOW,
    Outgoing,
    Recovery,
    RoundTrip,
)


def test_a_region_that_comes_back_starts_slowly() -> None:
    one = Recovery()
    one.heard(5.0)
    assert one.ramp(5.0) == 1.0  # heard for the first time: nothing was moved away from it
    one.lost(10.0)
    assert not one.trusted(10.0)
    one.heard(20.0)
    assert one.trusted(20.0)
    assert one.ramp(20.0) == RAMP_FIRST
    assert one.ramp(20.0 + RAMP_S / 2) == pytest.approx(0.5)
    assert one.ramp(20.0 + RAMP_S) == 1.0


def test_a_region_that_flaps_must_be_heard_for_longer_each_time() -> None:
    one, now = Recovery(), 0.0
    waits = []
    for _ in range(6):
        one.heard(now)
        waits.append(next(w for w in (0.0, 1.0, 2.0, 4.0) if one.trusted(now + w)))
        now += 10.0
        one.lost(now)
    assert waits == [0.0, 0.0, 1.0, 2.0, 4.0, 4.0]  # B23: back within ten seconds
    now += 100.0
    one.heard(now)
    one.lost(now)  # a minute without a loss forgives
    one.heard(now)
    assert one.trusted(now)


def test_own_sends_fade_and_are_taken_back_when_read() -> None:
    out = Outgoing()
    out.add(4.0, 10.0)
    assert out.left(11.0) == pytest.approx(2.0)
    out.add(1.0, 11.0)
    assert out.left(11.0) == pytest.approx(3.0)
    out.take_back(4.0, 10.0, 12.0)
    assert out.left(12.0) == pytest.approx(0.5)
    out.take_back(9.0, 12.0, 12.0)
    assert out.left(12.0) == 0.0


def test_the_least_of_the_last_round_trips_counts() -> None:
    trip = RoundTrip(0.08)
    assert trip.seconds == 0.08
    for seconds in (0.2, 0.05, *[0.1] * (TRIP_WINDOW - 1)):
        trip.measured(seconds)
    assert trip.seconds == 0.05
    trip.measured(0.1)
    assert trip.seconds == 0.1  # the way has become longer
