from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from core.engine.cost import StepCost
from core.engine.speculate import MOST_DRAFTS, Speculation, draft_lengths
from tests.core.engine.test_cost import plan


@dataclass
class Says:
    """A drafter that always says the same."""

    guess: tuple[int, ...]

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        return self.guess[:most]


def learned(right: float, dice: random.Random, rounds: int = 200) -> Speculation:
    """One whose guesses are right in that share of places, up to the first wrong one."""
    speculation = Speculation(Says((1,) * MOST_DRAFTS))
    tokens: list[int] = [0]
    for _ in range(rounds):
        speculation.guess(tokens)
        come = 0
        while come < MOST_DRAFTS and dice.random() < right:
            come += 1
        tokens.extend([1] * come)
        if come < MOST_DRAFTS:
            tokens.append(2)
    speculation.guess(tokens)
    return speculation


def known_cost(first_s: float, each_s: float) -> StepCost:
    cost = StepCost(1 / each_s, 1 / first_s)
    for tokens in range(1, 17):
        cost.note(plan(decode=1, drafts=tokens - 1), first_s + (tokens - 1) * each_s)
    return cost


def length(speculation: Speculation, cost: StepCost, *, most: int = MOST_DRAFTS) -> int:
    (found,) = draft_lengths([(speculation, most)], cost, decode=1, prompt=0, room=500)
    return found


def test_chances_come_to_what_happens() -> None:
    chances = learned(0.8, random.Random(1), rounds=2000).chances(3)
    assert chances[0] == pytest.approx(0.8, abs=0.25)
    assert chances[0] > chances[1] > chances[2]


def test_the_better_the_guesses_and_the_cheaper_the_tokens_the_more_are_checked() -> None:
    dice = random.Random(2)
    cheap, dear = known_cost(0.01, 0.001), known_cost(0.01, 0.005)
    good, poor = learned(0.97, dice), learned(0.02, dice)
    assert length(good, cheap) > length(good, dear) > 0
    assert length(poor, dear) == 0
    assert length(poor, cheap) <= 1


def test_the_length_is_the_one_of_most_expected_tokens_a_second() -> None:
    dice = random.Random(3)
    for _ in range(50):
        speculation = learned(dice.random(), dice, rounds=30)
        cost = known_cost(0.01, dice.uniform(0.0005, 0.008))
        chances = speculation.chances(MOST_DRAFTS)
        rates = [(1 + sum(chances[:n])) / cost.decode_s(1 + n) for n in range(MOST_DRAFTS + 1)]
        assert length(speculation, cost) == rates.index(max(rates))


def test_no_more_than_fit() -> None:
    good, cost = learned(0.99, random.Random(4)), known_cost(0.01, 0.0001)
    assert length(good, cost, most=3) == 3
    lengths = draft_lengths([(good, 15), (good, 15)], cost, decode=2, prompt=0, room=20)
    assert sum(lengths) == 20
    assert max(lengths) <= 15


def test_guesses_that_were_not_checked_count_when_the_tokens_have_come() -> None:
    speculation = Speculation(Says((1, 1, 1)))
    tokens = [0]
    before = speculation.chances(1)
    for _ in range(20):
        speculation.guess(tokens)
        tokens.append(1)  # the slow way, one by one
    assert speculation.chances(1) > before
    for _ in range(20):
        speculation.guess(tokens)
        tokens.append(2)
    assert speculation.chances(1) < before


def test_guesses_pay_less_where_other_steps_wait_for_them() -> None:
    """A pipeline's other tokens get nothing out of a longer step."""
    wish = [(learned(0.7, random.Random(5)), MOST_DRAFTS)]
    cost = known_cost(0.01, 0.001)
    alone, shared, crowded = (
        draft_lengths(wish, cost, decode=1, prompt=0, room=500, beside=others)[0]
        for others in (0, 4, 40)
    )
    assert alone > shared > crowded == 0
