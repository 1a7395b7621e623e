from __future__ import annotations

import pytest

from core.engine.gpu.graphs import LADDER, OVERDUE, GraphSizes


def asked(sizes: GraphSizes, *rows: int) -> None:
    for count in rows:
        sizes.use(count)


def test_nothing_is_captured_before_it_is_asked_for_twice() -> None:
    sizes = GraphSizes(64)
    assert sizes.next(idle=True) is None
    asked(sizes, 3)
    assert sizes.next(idle=True) is None
    asked(sizes, 4)
    assert sizes.next(idle=True) == 4
    sizes.captured(4)
    assert sizes.next(idle=True) is None


def test_the_most_asked_for_comes_first_and_the_smaller_of_two_equals() -> None:
    sizes = GraphSizes(64)
    asked(sizes, 30, 30, 30, 7, 7, 2, 2)
    order = []
    while (size := sizes.next(idle=True)) is not None:
        order.append(size)
        sizes.captured(size)
    assert order == [32, 2, 8]


def test_a_step_is_padded_to_the_next_captured_size() -> None:
    sizes = GraphSizes(64)
    assert sizes.use(5) is None
    for size in (8, 32):
        sizes.captured(size)
    assert [sizes.use(rows) for rows in (1, 8, 9, 32, 33)] == [8, 8, 32, 32, None]


def test_a_size_that_failed_is_served_by_a_larger_one() -> None:
    sizes = GraphSizes(64)
    asked(sizes, 8, 8, 12, 12)
    sizes.failed(8)
    assert sizes.next(idle=True) == 12
    sizes.captured(12)
    assert sizes.use(8) == 12
    assert sizes.next(idle=True) is None


@pytest.mark.parametrize(("most", "largest"), [(1, 1), (5, 5), (64, 64), (100, 100), (256, 256)])
def test_the_largest_step_has_a_size_of_its_own(most: int, largest: int) -> None:
    sizes = GraphSizes(most)
    asked(sizes, most, most)
    assert sizes.next(idle=True) == largest


def test_steps_beyond_the_ladder_have_no_graph() -> None:
    sizes = GraphSizes(1000)
    asked(sizes, 257, 257, 1000, 1000)
    assert sizes.next(idle=True) is None
    assert sizes.use(257) is None
    asked(sizes, 256, 256)
    assert sizes.next(idle=True) == LADDER[-1]


def test_ranks_that_see_the_same_steps_capture_in_the_same_order() -> None:
    first, second = GraphSizes(256), GraphSizes(256)
    for rows in (3, 9, 9, 60, 3, 200, 9, 60, 200, 1, 1):
        assert first.use(rows) == second.use(rows)
        size = first.next(idle=True)
        assert second.next(idle=True) == size
        if size is not None and rows % 2:
            first.captured(size)
            second.captured(size)


def test_a_device_that_is_never_idle_gets_its_graphs_in_the_end() -> None:
    sizes = GraphSizes(64)
    asked(sizes, *[5] * (OVERDUE - 1), *[9] * 3)
    assert sizes.next(idle=False) is None
    asked(sizes, 5)
    assert sizes.next(idle=False) == 8
    sizes.captured(8)
    assert sizes.next(idle=False) is None
    assert sizes.next(idle=True) == 12
