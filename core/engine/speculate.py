"""How many guesses are worth checking. Pure arithmetic over what was seen before.

Each sequence remembers how often its guesses were right, by place in the guess: a guess that was
not checked counts too, as soon as the tokens have come the slow way. So a sequence whose text has
begun to repeat is found without paying for it, and one that does not repeat costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.engine.cost import StepCost
from core.engine.drafter import Drafter

MOST_DRAFTS = 15
_MEMORY = 0.9
"""Weight that an observation keeps when the next one at the same place comes."""
_FIRST_CHANCE = 0.4
"""Of the first guess ever made. Of a later place, as good as the place before it."""


class Speculation:
    """Guesses of one sequence and what became of them."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._right = [0.0] * MOST_DRAFTS
        self._tried = [0.0] * MOST_DRAFTS
        self._guess: tuple[int, ...] = ()
        self._guessed_at = 0

    def guess(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """What may follow `tokens`, after the guess before was compared with them."""
        if len(tokens) != self._guessed_at or not self._guess:
            self._compare(tokens)
            self._guess = self._drafter.propose(tokens, MOST_DRAFTS)
            self._guessed_at = len(tokens)
        return self._guess

    def chances(self, most: int) -> list[float]:
        """For each place of a guess, how likely it and all before it are right."""
        chances: list[float] = []
        one, together = _FIRST_CHANCE, 1.0
        for place in range(most):
            one = (self._right[place] + one) / (self._tried[place] + 1)
            together *= one
            chances.append(together)
        return chances

    def _compare(self, tokens: Sequence[int]) -> None:
        known = len(tokens) - self._guessed_at
        for place, token in enumerate(self._guess[:known]):
            right = tokens[self._guessed_at + place] == token
            self._right[place] = self._right[place] * _MEMORY + right
            self._tried[place] = self._tried[place] * _MEMORY + 1
            if not right:
                return


def draft_lengths(
    wishes: Sequence[tuple[Speculation, int]],
    cost: StepCost,
    *,
    decode: int,
    prompt: int,
    room: int,
    beside: int = 0,
) -> list[int]:
    """How many guesses of each wish (its speculation, the most that it can use) to check in a step
    that has `decode` tokens of answers and `prompt` prompt tokens anyway, and space for `room`
    more: for one after the other, what gives the step the most expected tokens a second. `beside`:
    tokens of the steps that share a pipeline with it, which wait for what it takes."""
    expected = float(decode + beside)
    tokens = decode
    lengths: list[int] = []
    for speculation, most in wishes:
        best, best_rate, gain, best_gain = 0, expected / cost.step_s(tokens, prompt), 0.0, 0.0
        for length, chance in enumerate(speculation.chances(min(most, room)), start=1):
            gain += chance
            rate = (expected + gain) / cost.step_s(tokens + length, prompt)
            if rate > best_rate:
                best, best_rate, best_gain = length, rate, gain
        lengths.append(best)
        tokens += best
        room -= best
        expected += best_gain
    return lengths
