"""Whose guesses are checked in the next step, and how many of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.engine.cost import StepCost
from core.engine.drafter import Drafter
from core.engine.sequence import Sequence as Generation
from core.engine.shares import decoding, under_way
from core.engine.speculate import Speculation, draft_lengths


class Guessing:
    """`drafter` makes one for each sequence; `budget` is a step's, in tokens; `stages` are those of
    the pipeline that steps go through."""

    def __init__(
        self, drafter: Callable[[], Drafter], cost: StepCost, *, budget: int, stages: int = 1
    ) -> None:
        self._drafter = drafter
        self._cost = cost
        self._budget = budget
        self._stages = stages

    def waits(self, running: Sequence[Generation], drafts: bool) -> bool:
        """Had the next step better wait for those in flight: are there `drafts` in one of them, or
        would somebody have guesses checked whose newest token is? In a pipeline nobody's next row
        is planned meanwhile, and the others need not wait."""
        if self._stages > 1:
            return False
        return drafts or bool(self.choose(running, decoding(running, 1)))

    def choose(
        self, running: Sequence[Generation], ones: Sequence[Generation]
    ) -> dict[Generation, tuple[int, ...]]:
        """Guesses worth checking, of the `ones` of `running` that decode in the next step; nobody
        without any is in it.

        For one whose newest token is still in flight they are what would be checked if it were not.
        """
        ideas: list[tuple[Generation, Speculation, tuple[int, ...]]] = []
        for one in ones:
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
            decode=len(ones),
            beside=under_way(running) if self._stages > 1 else 0,
            prompt=min(reading, self._budget),
            room=max(0, self._budget - len(ones)),
        )
        pairs = zip(ideas, lengths, strict=True)
        return {one: guess[:length] for (one, _, guess), length in pairs if length}
