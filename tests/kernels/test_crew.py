"""When a call takes one thread only: while others hold the cores."""

from __future__ import annotations

from kernels.cpu.crew import LONGEST_S, SHORTEST_S, Crew


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def call(crew: Crew, clock: Clock, *, lost: float = 0.0, seconds: float = 0.01) -> int:
    """One call, whose threads lost a share of its time. The threads it took."""
    threads = crew.begin()
    clock.now += seconds
    crew.end(int(lost * seconds * 1e9) if threads > 1 else 0)
    return threads


def test_all_threads_while_nobody_disturbs_them() -> None:
    clock = Clock()
    crew = Crew(4, clock)
    assert [call(crew, clock, lost=0.2) for _ in range(50)] == [4] * 50


def test_one_hiccup_changes_nothing() -> None:
    clock = Clock()
    crew = Crew(2, clock)
    for _ in range(5):
        assert call(crew, clock, lost=0.95) == 2
        assert [call(crew, clock) for _ in range(20)] == [2] * 20


def lose(crew: Crew, clock: Clock) -> None:
    """Calls on all threads that lose nearly all their time, until one is to go on alone."""
    assert call(crew, clock, lost=0.9) == 2
    assert call(crew, clock, lost=0.9) == 2


def test_one_goes_on_alone_and_then_all_try_again() -> None:
    clock = Clock()
    crew = Crew(2, clock)
    lose(crew, clock)
    alone = 0
    while call(crew, clock) == 1:
        alone += 1
    assert SHORTEST_S / 0.01 - 1 <= alone <= SHORTEST_S / 0.01 + 1
    assert call(crew, clock) == 2


def test_tries_grow_rare_while_the_cores_are_held_and_frequent_again_afterwards() -> None:
    clock = Clock()
    crew = Crew(2, clock)

    def calls_alone() -> int:
        found = 0
        while call(crew, clock, lost=0.9) == 1:
            found += 1
        assert call(crew, clock, lost=0.9) == 2
        return found

    lose(crew, clock)
    pauses = [calls_alone() for _ in range(8)]
    assert pauses == sorted(pauses)
    assert pauses[1] > 1.5 * pauses[0]
    assert abs(pauses[-1] - LONGEST_S / 0.01) <= 2
    while call(crew, clock) == 1:
        pass
    for _ in range(int(2 * LONGEST_S / 0.01)):  # quiet again
        call(crew, clock)
    lose(crew, clock)
    assert calls_alone() <= SHORTEST_S / 0.01 + 1


def test_one_thread_has_nobody_to_wait_for() -> None:
    clock = Clock()
    crew = Crew(1, clock)
    assert [call(crew, clock, lost=1.0) for _ in range(3)] == [1, 1, 1]
