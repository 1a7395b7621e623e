"""How many nodes are wanted: a table of moments, and what holds whatever the load does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config_scale import Scale
from regional.scaler import Load, Standing, Why, bounds, decide

SCALE = Scale(least=0, most=4, idle_s=60.0, queue_s=1.0, calm_s=20.0)
ONE_UP = Load(there=4, up=1, slots=8)
TWO_UP = Load(there=4, up=2, slots=16)
OFF = Load(there=4, up=0, idle_s=500.0)
NOW = 1000.0
LONG_AGO = 100.0


def stands(wanted: int, raised_at: float = LONG_AGO, calm_since: float | None = None) -> Standing:
    return Standing(wanted, Why.ASKED, raised_at, calm_since)


TABLE: list[tuple[str, Load, Scale, Standing | None, int, Why]] = [
    ("the first look keeps what is up", TWO_UP, SCALE, None, 2, Why.FIRST_LOOK),
    ("and no more than may be", replace(TWO_UP, up=4), Scale(most=3), None, 3, Why.FIRST_LOOK),
    ("and no less", OFF, Scale(least=2), None, 2, Why.FIRST_LOOK),
    ("cold, nobody asks", OFF, SCALE, stands(0), 0, Why.ASKED),
    ("cold, and somebody waits", replace(OFF, waiting=1, idle_s=0.0), SCALE, stands(0), 1,
     Why.ASKED),
    ("nobody has to wait, for another router's caller was first",
     replace(OFF, up=1, idle_s=0.0), SCALE, stands(0), 1, Why.ASKED),
    ("on its way out", replace(OFF, up=1), SCALE, stands(0), 0, Why.ASKED),
    ("somebody waits before the first look", replace(OFF, waiting=1), SCALE, None, 1, Why.ASKED),
    ("idle, not for long", replace(ONE_UP, idle_s=59.9), SCALE, stands(1), 1, Why.ASKED),
    ("idle for long", replace(ONE_UP, idle_s=60.0), SCALE, stands(1), 0, Why.IDLE),
    ("idle, but one is always there", replace(TWO_UP, idle_s=60.0),
     Scale(least=1, idle_s=60.0), stands(2), 1, Why.IDLE),
    ("idle by the clock, but one waits", replace(ONE_UP, idle_s=60.0, waiting=1), SCALE,
     stands(1), 1, Why.ASKED),
    ("the queue is as long as it may be", replace(ONE_UP, queue_s=1.0), SCALE, stands(1), 1,
     Why.ASKED),
    ("the queue is too long", replace(ONE_UP, queue_s=1.1), SCALE, stands(1), 2, Why.QUEUE),
    ("a flood doubles, no more", replace(ONE_UP, queue_s=90.0), SCALE, stands(1), 2, Why.QUEUE),
    ("and stays within the bound", replace(ONE_UP, up=3, queue_s=90.0), SCALE, stands(3), 4,
     Why.QUEUE),
    ("one is starting already", replace(ONE_UP, queue_s=9.0), SCALE, stands(2), 2, Why.ASKED),
    ("one was started a moment ago", replace(ONE_UP, queue_s=9.0), SCALE,
     stands(1, raised_at=NOW - 4.9), 1, Why.ASKED),
    ("slow first tokens", replace(ONE_UP, first_token_s=3.0),
     Scale(most=4, first_token_s=2.0), stands(1), 2, Why.FIRST_TOKEN),
    ("first tokens that nobody bounds", replace(ONE_UP, first_token_s=3.0), SCALE, stands(1), 1,
     Why.ASKED),
    ("calm for long enough", TWO_UP, SCALE, stands(2, calm_since=NOW - 20.0), 1, Why.CALM),
    ("calm, not for long", TWO_UP, SCALE, stands(2, calm_since=NOW - 19.9), 2, Why.ASKED),
    ("what runs would not fit into one", replace(TWO_UP, sequences=6), SCALE,
     stands(2, calm_since=NOW - 20.0), 2, Why.ASKED),
    ("the last one goes for idleness only", ONE_UP, SCALE, stands(1, calm_since=LONG_AGO), 1,
     Why.ASKED),
    ("the topology allows fewer now", replace(TWO_UP, there=1), SCALE, stands(2), 1, Why.BOUNDS),
]  # fmt: skip


@pytest.mark.parametrize(("load", "scale", "before", "wanted", "why"),
                         [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])  # fmt: skip
def test_decisions(
    load: Load, scale: Scale, before: Standing | None, wanted: int, why: Why
) -> None:
    one = decide(load, scale, before, NOW)
    assert (one.wanted, one.why) == (wanted, why)


def test_a_wait_in_between_begins_the_calm_anew() -> None:
    calm = decide(TWO_UP, SCALE, stands(2), 0.0)
    assert calm.calm_since == 0.0
    busy = decide(replace(TWO_UP, queue_s=0.6), SCALE, calm, 19.0)
    assert busy.calm_since is None
    assert decide(TWO_UP, SCALE, busy, 21.0).wanted == 2


SECONDS = st.floats(0.0, 200.0)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    there = draw(st.integers(1, 6))
    up = draw(st.integers(0, there))
    return Load(
        there=there,
        up=up,
        waiting=draw(st.integers(0, 5)),
        idle_s=draw(SECONDS),
        queue_s=draw(SECONDS),
        first_token_s=draw(SECONDS),
        sequences=draw(st.integers(0, 8 * up)),
        slots=8 * up,
    )


@st.composite
def scales(draw: st.DrawFn) -> Scale:
    least = draw(st.integers(0, 4))
    return Scale(
        least=least,
        most=draw(st.none() | st.integers(max(1, least), 6)),
        idle_s=draw(st.floats(0.1, 100.0)),
        queue_s=draw(st.floats(0.1, 100.0)),
        first_token_s=draw(st.none() | st.floats(0.1, 100.0)),
        calm_s=draw(st.floats(0.1, 100.0)),
    )


@given(scales(), st.lists(st.tuples(loads(), st.floats(0.0, 100.0)), max_size=12))
def test_whatever_the_load_does(scale: Scale, moments: list[tuple[Load, float]]) -> None:
    """Never outside the bounds; to nothing only after `idle_s` and with nobody waiting; from
    nothing as soon as somebody waits."""
    before: Standing | None = None
    now = 0.0
    for load, passed in moments:
        now += passed
        one = decide(load, scale, before, now)
        least, most = bounds(scale, load.there)
        assert least <= one.wanted <= most
        if load.waiting:
            assert one.wanted >= 1
        if before is not None and before.wanted and not one.wanted:
            assert load.idle_s >= scale.idle_s
            assert not load.waiting
        if before is not None and before.wanted <= most:
            assert one.wanted <= max(1, least, 2 * before.wanted)
        before = one


@given(st.integers(1, 15), st.integers(1, 15), st.floats(1.1, 50.0))
def test_a_load_that_comes_and_goes_changes_nothing(
    busy_s: int, calm_s: int, wait_s: float
) -> None:
    """Up to what the rush needs, and then no change for as long as no pause is `calm_s` long."""
    one = stands(1)
    seen: list[int] = []
    for second in range(300):
        rush = second % (busy_s + calm_s) < busy_s
        queue_s = wait_s / one.wanted if rush else 0.0
        load = Load(there=4, up=one.wanted, queue_s=queue_s, slots=8 * one.wanted)
        one = decide(load, SCALE, one, LONG_AGO + second)
        seen.append(one.wanted)
    assert seen == sorted(seen)
    assert seen[-1] > 1
