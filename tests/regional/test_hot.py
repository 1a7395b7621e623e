"""Heavy hitters in bounded memory: never too high, too low by no more than is said."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regional.hot import NEW_IN_A_PROMPT, PUBLISHED, WINDOW_S, HotCounter


def _id(number: int) -> bytes:
    return number.to_bytes(8)


def test_counts_are_bounded_and_the_error_is_as_stated() -> None:
    """A Zipf stream over far more ids than the table holds."""
    counter, true = HotCounter(size=64), dict[int, int]()
    chance = random.Random(5)
    numbers = [int(chance.paretovariate(0.7)) for _ in range(20_000)]
    for number in numbers:
        counter.count([_id(number)], 0.0)
        true[number] = true.get(number, 0) + 1
        assert len(counter) <= 128
    assert counter.lost <= len(numbers) / 65
    counted = {int.from_bytes(one): count for one, count in counter.frequent(0.0, 0.0)}
    for number, count in true.items():
        found = counted.get(number, 0.0)
        assert found <= count
        assert found >= count - counter.lost - 1
    assert counter.total == 20_000


_chains = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=120)


def _ids(path: list[int]) -> list[bytes]:
    """The chain of a path in a tree: equal beginnings have equal ids."""
    return [bytes(path[: end + 1]).ljust(12, b"\xff") for end in range(len(path))]


@given(_chains, st.integers(2, 12))
def test_no_chain_of_prompts_breaks_the_stated_error(paths: list[list[int]], size: int) -> None:
    """Whatever is asked in whatever order, in a table far too small for it."""
    counter, true, cuts = HotCounter(size=size), Counter[bytes](), 0
    for path in paths:
        before = counter.lost
        counter.count(_ids(path), 0.0)
        cuts += counter.lost > before
        true.update(_ids(path))
        assert len(counter) <= 2 * size
    assert counter.lost <= true.total() / (size + 1)
    counted = dict(counter.frequent(0.0, 0.0))
    for path in paths:
        for depth, one in enumerate(_ids(path), start=1):
            waited = -(-depth // NEW_IN_A_PROMPT) * (1 + cuts)
            assert counted.get(one, 0.0) <= true[one]
            # A count below one is not among the frequent.
            assert counted.get(one, 1.0) >= true[one] - counter.lost - waited


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 40)), max_size=60))
def test_no_count_is_ever_too_high(asked: list[tuple[int, float]]) -> None:
    """Also while it fades: against sums that fade by the same ticks."""
    counter, now, true = HotCounter(size=4), 0.0, Counter[bytes]()
    for number, pause in asked:
        now += pause
        counter.count([_id(number)], now)
        true[_id(number)] += 1
        assert all(count <= true[one] + 1e-9 for one, count in counter.frequent(0.0, now))
    assert counter.total <= len(asked)


def test_the_unique_rest_of_prompts_does_not_fill_the_table() -> None:
    counter = HotCounter(size=4096)
    for number in range(100):
        counter.count([_id(1), *(_id(1000 * number + i) for i in range(2, 100))], 0.0)
    assert len(counter) <= 100 * NEW_IN_A_PROMPT


def test_a_long_shared_beginning_is_counted_to_its_end() -> None:
    counter, shared = HotCounter(), [_id(i) for i in range(32)]
    for _ in range(60):
        counter.count(shared, 0.0)
    counts = dict(counter.frequent(0.0, 0.0))
    assert counts[shared[0]] == 60
    assert counts[shared[-1]] == 60 - (32 / NEW_IN_A_PROMPT - 1)


def test_counts_decay_over_the_window() -> None:
    counter = HotCounter()
    for _ in range(100):
        counter.count([_id(1)], 0.0)
    [(_, left)] = counter.frequent(0.0, WINDOW_S)
    assert left == pytest.approx(100 / 2.71828, rel=0.01)
    assert counter.total == pytest.approx(left)
    assert counter.frequent(0.0, 20 * WINDOW_S) == []
    assert len(counter) == 0


def test_a_publication_is_bounded() -> None:
    counter = HotCounter()
    for number in range(2000):
        for _ in range(1 + number % 3):
            counter.count([_id(number)], 0.0)
    found = counter.frequent(0.0, 0.0)
    assert len(found) == PUBLISHED
    assert min(count for _, count in found) == 3.0
    assert counter.frequent(0.5, 0.0) == []
