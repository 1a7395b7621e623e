"""A sequence as its front sees it, and a drafter that has read the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from core.engine.lending_messages import Held
from core.engine.messages import Reserved, SequenceSpec
from core.types import FinishReason

if TYPE_CHECKING:
    from tests.core.engine.harness import Front

END = 1


@dataclass
class Watched:
    """A sequence as its front sees it."""

    spec: SequenceSpec
    kind: Literal["run", "reserve", "prefill", "import", "hold"]
    stage: Literal[
        "queued", "reserved", "held", "done", "failed", "aborted", "moved", "parting"
    ] = "queued"
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    computed: int | None = None
    reserved: Reserved | None = None
    told: tuple[int, ...] = ()
    """Blocks of a prefill, which stay the same from the first progress on."""
    held: Held | None = None
    code: str = ""
    message: str = ""
    counted: int = 0
    """Prompt tokens that plans computed before the first output, none of them twice."""
    seen: int = 0
    """Positions that were in place at some time."""


class Prophet:
    """A drafter that knows how the story goes and now and then says something else."""

    def __init__(self, front: Front, dice: random.Random) -> None:
        self._front = front
        self._dice = dice

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        guess: list[int] = []
        for watched in self._front.all.values():
            known = (*watched.spec.token_ids, *watched.spec.output_ids)
            if tuple(tokens[: len(known)]) == known:
                text = self._front.solo(watched.spec)[0]
                guess = text[len(tokens) - len(known) :][:most]
        wrong = self._dice.randrange(12)
        if wrong < len(guess):
            guess[wrong] = self._dice.choice((0, END, guess[wrong] + 1))
        return tuple(guess[: self._dice.randrange(most + 1)])
