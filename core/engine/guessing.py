"""Whose guesses are checked in the next step, and how many of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.engine.cost import StepCost
from core.engine.drafter import Drafter
from core.engine.sequence import Sequence as Generation
from core.engine.speculate import Speculation, draft_lengths


class Guessing:
    """`drafter` makes one for each sequence; `budget` is a step's, in tokens."""

    def __init__(self, drafter: Callable[[], Drafter], cost: StepCost, *, budget: int) -> None:
        self._drafter = drafter
        self._cost = cost
        self._budget = budget

    def choose(self, running: Sequence[Generation]) -> dict[Generation, tuple[int, ...]]:
        """Guesses worth checking, of those that decode next; nobody without any is in it.

        For one whose newest token is still in flight they are what would be checked if it were not.
        """
        decoding = [one for one in running if one.remaining == 1]
        ideas: list[tuple[Generation, Speculation, tuple[int, ...]]] = []
        for one in decoding:
            if one.prefill_only:
                continue
            if one.speculation is None:
                one.speculation = Speculation(self._drafter())
            guess = one.speculation.guess(one.tokens)
            guess = guess[: max(0, one.limit - len(one.tokens) - 1)]  # one more comes of itself
            if guess:
                ideas.append((one, one.speculation, guess))
        if not ideas:
            return {}
        reading = sum(one.remaining for one in running if one.remaining > 1)
        lengths = draft_lengths(
            [(speculation, len(guess)) for _, speculation, guess in ideas],
            self._cost,
            decode=len(decoding),
            prompt=min(reading, self._budget),
            room=max(0, self._budget - len(decoding)),
        )
        pairs = zip(ideas, lengths, strict=True)
        return {one: guess[:length] for (one, _, guess), length in pairs if length}
