from __future__ import annotations

import random

import pytest

from core.engine.drafter import PromptLookup


def test_it_says_what_followed_the_same_tokens() -> None:
    assert PromptLookup().propose([1, 2, 3, 4, 5, 9, 2, 3], 3) == (4, 5, 9)


def test_the_longer_likeness_counts_and_then_the_later_one() -> None:
    drafter = PromptLookup()
    long = [1, 2, 3, 4, 50, 0, 3, 4, 60, 0, 1, 2, 3, 4]
    assert drafter.propose(long, 1) == (50,)  # of four; of two it would be 60
    assert PromptLookup().propose([3, 4, 50, 3, 4, 60, 3, 4], 1) == (60,)


def test_what_repeats_goes_on_repeating() -> None:
    assert PromptLookup().propose([7, 8, 9, 7, 8], 7) == (9, 7, 8, 9, 7, 8, 9)
    assert PromptLookup().propose([5, 5, 5], 4) == (5, 5, 5, 5)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6]])
def test_it_has_no_idea_where_nothing_repeats(tokens: list[int]) -> None:
    assert PromptLookup().propose(tokens, 5) == ()


def test_grown_token_by_token_it_says_the_same_as_afresh() -> None:
    dice = random.Random(3)
    tokens: list[int] = []
    grown = PromptLookup()
    for _ in range(400):
        tokens.extend(dice.randrange(4) for _ in range(dice.randrange(1, 3)))
        assert grown.propose(tokens, 6) == PromptLookup().propose(tokens, 6)


def test_its_memory_is_bounded_and_forgets_what_was_not_seen_for_longest() -> None:
    drafter = PromptLookup(most_entries=10)
    tokens = [1, 2, 77, *range(1000, 1200)]
    assert drafter.propose([*tokens, 1, 2], 1) == ()
    assert drafter.propose([*tokens, 1, 2, 1195, 1196], 1) == (1197,)
    assert all(len(follows) <= 10 for follows in drafter._follows.values())
