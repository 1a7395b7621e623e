"""Who runs where places are shared: cases one by one, then whole afternoons in virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import Pool
from core.pools import FALLS, IDLE_S, LATE_S, Claim, Key, Leave, Moves, Seat, State, decide
from core.types import Role

TURN_S = 30.0
GPU = {"gpu": Pool(places=1, turn_s=TURN_S)}
OFF_LONG = math.inf


def seat(name: str, state: State = State.OFF, role: str = Role.COMBINED, **more: object) -> Seat:
    """Node `a1` serves model `a`."""
    known = {"pool": "gpu", "since_s": OFF_LONG if state is State.OFF else 100.0, **more}
    return Seat(name, name[0], role, state=state, **known)  # type: ignore[arg-type] # by name


def claims(role: str = Role.COMBINED, **of: Claim) -> dict[Key, Claim]:
    return {(model, role): claim for model, claim in of.items()}


WANTED = Claim(nodes=1)
USED = Claim(nodes=1, in_use=True)
ASKED = Claim(nodes=1, waiting=1, waiting_s=1.0, in_use=True)
IDLE = replace(seat("a1", State.UP), idle_s=5.0)
BUSY = replace(seat("a1", State.UP), placed=1)
FRESH = replace(BUSY, since_s=TURN_S - 1)
NEXT = seat("b1")


def gives_way(name: str, heir: str) -> Moves:
    return Moves(leave=(Leave(name, heir),))


CASES = {
    "a free place goes to who is waited for": (
        [seat("a1"), NEXT], claims(a=WANTED, b=ASKED), Moves(start=("b1",))),
    "a number alone starts nobody in a pool": (
        [seat("a1"), NEXT], claims(a=WANTED, b=WANTED), Moves()),
    "what is used may take a free place": (
        [seat("a1"), NEXT], claims(a=USED, b=WANTED), Moves(start=("a1",))),
    "the longest wait comes first": (
        [seat("a1"), NEXT], claims(a=ASKED, b=replace(ASKED, waiting_s=2.0)),
        Moves(start=("b1",))),
    "who has just had a place stands behind": (
        [replace(seat("a1"), since_s=0.5), NEXT],
        claims(a=replace(ASKED, waiting_s=20.0), b=ASKED), Moves(start=("b1",))),
    "an idle one gives way at once": (
        [IDLE, NEXT], claims(a=WANTED, b=ASKED), gives_way("a1", "b")),
    "but not in the pause between two requests": (
        [replace(IDLE, idle_s=IDLE_S / 2, since_s=1.0), NEXT], claims(a=WANTED, b=ASKED), Moves()),
    "nor to who is not waited for": (
        [IDLE, NEXT], claims(a=WANTED, b=USED), Moves()),
    "after a turn also to that": (
        [replace(IDLE, idle_s=TURN_S), NEXT], claims(a=WANTED, b=USED), gives_way("a1", "b")),
    "requests on their way to it count": (
        [replace(IDLE, since_s=1.0), NEXT], claims(a=ASKED, b=ASKED), Moves()),
    "a busy one stays for its turn": (
        [FRESH, NEXT], claims(a=USED, b=ASKED), Moves()),
    "and then goes": ([BUSY, NEXT], claims(a=USED, b=ASKED), gives_way("a1", "b")),
    "a place is free when its owner has gone": (
        [seat("a1", State.LEAVING), NEXT], claims(a=WANTED, b=ASKED), Moves()),
    "nobody else goes for a place that is coming": (
        [seat("a1", State.LEAVING), seat("c1", State.UP, idle_s=9.0), NEXT],
        claims(a=WANTED, b=ASKED, c=WANTED), Moves()),
    "one that starts is not disturbed": (
        [seat("a1", State.STARTING), NEXT], claims(a=ASKED, b=ASKED), Moves()),
    "unless whoever asked for it has gone": (
        [seat("a1", State.STARTING), NEXT], claims(a=WANTED, b=ASKED), gives_way("a1", "b")),
    "or it never comes up": (
        [seat("a1", State.STARTING, since_s=LATE_S), NEXT], claims(a=ASKED, b=ASKED),
        gives_way("a1", "b")),
    "or it falls and falls": (
        [seat("a1", State.STARTING, since_s=TURN_S, falls=FALLS), NEXT], claims(a=ASKED, b=ASKED),
        gives_way("a1", "b")),
    "what always runs is never asked to go": (
        [BUSY, NEXT], claims(a=replace(USED, least=1), b=ASKED), Moves()),
    "and comes before all others": (
        [seat("a1"), NEXT], claims(a=replace(WANTED, least=1), b=ASKED), Moves(start=("a1",))),
    "too many go, the last ones first": (
        [seat("a1", State.UP, pool=None), seat("a2", State.UP, pool=None)],
        claims(a=WANTED), Moves(leave=(Leave("a2"),))),
    "nobody is wanted": ([IDLE], claims(a=Claim(nodes=0)), Moves(leave=(Leave("a1"),))),
    "what has a place of its own just runs": (
        [seat("a1", pool=None), seat("a2", pool=None)], claims(a=Claim(nodes=2)),
        Moves(start=("a1", "a2"))),
    "and is preferred to a shared one": (
        [seat("a1"), seat("a2", pool=None)], claims(a=ASKED), Moves(start=("a2",))),
    "what nobody speaks of is left alone": ([BUSY, IDLE, NEXT], claims(b=ASKED), Moves()),
    "what a rollout holds stays": (
        [replace(BUSY, kept=True), NEXT], claims(a=USED, b=ASKED), Moves()),
    "and is not started": ([replace(NEXT, kept=True)], claims(b=ASKED), Moves()),
    "what failed for good holds no place": (
        [seat("a1", State.FAILED), NEXT], claims(a=ASKED, b=ASKED), Moves(start=("b1",))),
    "what rests by order gives way": (
        [replace(BUSY, placed=0, rests=True), NEXT], claims(a=WANTED, b=ASKED),
        gives_way("a1", "b")),
    "and is not started in a pool": ([replace(NEXT, rests=True)], claims(b=ASKED), Moves()),
    "another one runs for what rests": (
        [seat("a1", State.UP, pool=None, rests=True), seat("a2", pool=None)], claims(a=WANTED),
        Moves(start=("a2",), leave=(Leave("a1"),))),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_place(case: str) -> None:
    seats, of, moves = CASES[case]
    assert decide(seats, of, GPU) == moves


TWO = {"gpu": Pool(places=2, turn_s=TURN_S)}


def test_who_leaves_its_model_served_goes_first() -> None:
    seats = [replace(BUSY, since_s=900.0), seat("c1", State.UP, placed=1),
             seat("c2", State.UP, placed=3), NEXT]  # fmt: skip
    pool = {"gpu": Pool(places=3, turn_s=TURN_S)}
    moves = decide(seats, claims(a=USED, b=ASKED, c=replace(USED, nodes=2)), pool)
    assert moves == gives_way("c1", "b")


def test_a_second_node_of_a_model_takes_an_idle_place_and_no_busy_one() -> None:
    more = replace(ASKED, nodes=2)
    seats = [BUSY, seat("a2"), replace(IDLE, name="b1", model="b")]
    assert decide(seats, claims(a=more, b=WANTED), TWO) == gives_way("b1", "a")
    seats[2] = replace(seats[2], placed=1, idle_s=0.0)
    assert decide(seats, claims(a=more, b=USED), TWO) == Moves()


def test_each_that_waits_takes_one_place() -> None:
    seats = [replace(IDLE, idle_s=5.0), replace(IDLE, name="d1", model="d", idle_s=9.0),
             NEXT, seat("c1")]  # fmt: skip
    of = claims(a=WANTED, d=WANTED, b=ASKED, c=replace(ASKED, waiting_s=3.0))
    assert decide(seats, of, TWO).leave == (Leave("d1", "c"), Leave("a1", "b"))
    seats[1] = replace(seats[1], state=State.LEAVING)
    assert decide(seats, of, TWO).leave == (Leave("a1", "b"),), "c has the one that is coming"


def test_of_two_pools_the_free_one_is_taken() -> None:
    pools = {"gpu": GPU["gpu"], "gpu2": GPU["gpu"]}
    seats = [IDLE, NEXT, seat("b2", pool="gpu2")]
    assert decide(seats, claims(a=WANTED, b=ASKED), pools) == Moves(start=("b2",))


def test_what_answers_comes_before_what_only_reads() -> None:
    seats = [seat("a1", role=Role.PREFILL), seat("a2", role=Role.DECODE)]
    of: dict[Key, Claim] = {("a", Role.PREFILL): ASKED, ("a", Role.DECODE): ASKED}
    assert decide(seats, of, GPU).start == ("a2",)
    assert set(decide(seats, of, TWO).start) == {"a1", "a2"}
    reads = [replace(seats[0], state=State.UP, idle_s=1.0), seats[1]]
    of["a", Role.PREFILL] = WANTED
    assert decide(reads, of, GPU) == gives_way("a1", "a"), "its own reader goes for it"


# ---------------------------------------------------------------------- virtual time

TICK_S = 0.1
EXIT_S = 0.3


@dataclass
class Ran:
    """A request; seconds of the day."""

    model: str
    came: float
    lasts: float
    began: float | None = None
    ended: float | None = None


@dataclass
class Machine:
    """A node as its launcher knows it."""

    name: str
    model: str
    pool: str | None
    start_s: float
    state: State = State.OFF
    since: float = -math.inf
    answers: list[Ran] = field(default_factory=list)
    ended: float = 0.0

    def seat(self, now: float) -> Seat:
        return Seat(
            self.name, self.model, Role.COMBINED, self.pool, self.state, len(self.answers),
            0.0 if self.answers else now - max(self.ended, self.since), now - self.since,
        )  # fmt: skip


class Afternoon:
    """Requests of several models on one machine, whose node starts take time. A node takes any
    number at once; one that leaves takes none and ends its answers first."""

    def __init__(self, machines: Sequence[Machine], pool: Pool, requests: Sequence[Ran]) -> None:
        self.machines, self.pool, self.requests = machines, pool, requests
        self.now = 0.0
        self.swaps = self.most = 0

    def run(self, until: float) -> None:
        while self.now < until and not all(one.ended is not None for one in self.requests):
            self.step()

    def step(self) -> None:
        self.now += TICK_S
        for one in self.machines:
            self._go_on(one)
        self._place()
        moves = decide([m.seat(self.now) for m in self.machines], self._claims(), self._pools())
        names = {m.name: m for m in self.machines}
        for leave in moves.leave:
            assert names[leave.name].state in (State.UP, State.STARTING)
            self._turn(names[leave.name], State.LEAVING)
        for name in moves.start:
            assert names[name].state is State.OFF
            self._turn(names[name], State.STARTING)
            self.swaps += 1
        there = sum(m.state is not State.OFF for m in self.machines)
        assert there <= self.pool.places
        self.most = max(self.most, there)

    def waits(self) -> list[float]:
        return [(one.began or math.inf) - one.came for one in self.requests]

    def _go_on(self, one: Machine) -> None:
        for answer in [a for a in one.answers if (a.began or 0.0) + a.lasts <= self.now]:
            answer.ended = one.ended = self.now
            one.answers.remove(answer)
        passed = self.now - one.since
        if one.state is State.STARTING and passed >= one.start_s:
            self._turn(one, State.UP)
        elif one.state is State.LEAVING and not one.answers and passed >= EXIT_S:
            self._turn(one, State.OFF)

    def _turn(self, one: Machine, state: State) -> None:
        one.state, one.since = state, self.now

    def _place(self) -> None:
        for request in self.requests:
            if request.came <= self.now and request.began is None:
                up = [m for m in self.machines
                      if m.model == request.model and m.state is State.UP]  # fmt: skip
                if up:
                    request.began = self.now
                    min(up, key=lambda m: len(m.answers)).answers.append(request)

    def _pools(self) -> dict[str, Pool]:
        return {"gpu": self.pool}

    def _claims(self) -> dict[Key, Claim]:
        found: dict[Key, Claim] = {}
        for model in dict.fromkeys(m.model for m in self.machines):
            mine = [one for one in self.requests if one.model == model and one.came <= self.now]
            waiting = [self.now - one.came for one in mine if one.began is None]
            in_use = any(one.ended is None for one in mine)
            found[model, Role.COMBINED] = Claim(
                1 if mine else 0, 0, len(waiting), max(waiting, default=0.0), in_use
            )
        return found


def machines(models: str, start_s: float = 2.0) -> list[Machine]:
    return [Machine(f"{model}1", model, "gpu", start_s) for model in models]


@st.composite
def afternoons(draw: st.DrawFn) -> tuple[Afternoon, float]:
    """With a bound on how long anybody may wait. Some models are asked now and then, others all the
    time, by streams that overlap."""
    models = "abcd"[: draw(st.integers(2, 4))]
    start_s = draw(st.sampled_from([0.2, 2.0]))
    turn_s = draw(st.sampled_from([0.5, 3.0]))
    longest_s = draw(st.sampled_from([0.5, 2.0]))
    requests: list[Ran] = []
    for model in models:
        if draw(st.booleans()):
            requests += [Ran(model, n * 0.4, longest_s) for n in range(200)]
        else:
            seldom = st.tuples(st.floats(0, 60), st.floats(0.05, longest_s))
            told = draw(st.lists(seldom, min_size=1, max_size=5))
            requests += [Ran(model, came, lasts) for came, lasts in told]
    places = draw(st.integers(1, len(models) - 1))
    day = Afternoon(machines(models, start_s), Pool(places=places, turn_s=turn_s), requests)
    turn = turn_s + longest_s + start_s + EXIT_S + IDLE_S + 10 * TICK_S
    return day, len(models) * turn


@settings(max_examples=15, deadline=None)
@given(afternoons())
def test_places_hold_and_nobody_starves(told: tuple[Afternoon, float]) -> None:
    day, longest_wait_s = told
    day.run(until=2000.0)
    assert all(one.ended is not None for one in day.requests), "nobody is left over"
    assert max(day.waits()) <= longest_wait_s
    for one in day.requests:
        assert one.began is not None
        assert one.ended is not None
        assert one.ended - one.began >= one.lasts - TICK_S, "no answer is cut short"


def test_models_take_turns_where_all_are_always_asked() -> None:
    requests = [Ran(model, n * 0.2, 1.0) for n in range(500) for model in "ab"]
    day = Afternoon(machines("ab"), Pool(places=1, turn_s=10.0), requests)
    day.run(until=1000.0)
    swap_s = 2.0 + EXIT_S + 1.0  # start, end, rest of the answers
    assert day.swaps <= day.now / 10.0 + 2, "no more often than turns allow"
    assert max(day.waits()) <= 10.0 + 2 * swap_s + 1.0
    assert day.now <= 100.0 + 3 * (10.0 + swap_s)


def test_asked_alternately_each_waits_for_one_start_and_no_turn() -> None:
    requests = [Ran("ab"[n % 2], n * 6.0, 1.0) for n in range(20)]
    day = Afternoon(machines("ab"), Pool(places=1, turn_s=TURN_S), requests)
    day.run(until=1000.0)
    assert day.swaps == 20
    assert max(day.waits()) <= 2.0 + EXIT_S + 3 * TICK_S


def test_a_burst_that_alternates_is_served_model_by_model() -> None:
    requests = [Ran("ab"[n % 2], 0.05 * n, 0.5) for n in range(60)]
    day = Afternoon(machines("ab"), Pool(places=1, turn_s=TURN_S), requests)
    day.run(until=1000.0)
    assert day.swaps == 2, "all of one, then all of the other"
    assert day.now <= 2 * (2.0 + EXIT_S) + 3.0 + 1.5
