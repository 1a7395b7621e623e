"""The writer of one choice: sampled ids in, text to send out.

It decides where an answer ends in text: at an end token, which prints nothing, or where a stop
string is complete. The engine stops by ids alone, so more ids may come after that; they are
dropped. How ids fall into steps changes neither text, finish nor count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.text.detokenizer import Detokenizer
from core.text.stop import StopMatcher
from core.types import FinishReason


@dataclass(frozen=True, slots=True)
class Written:
    """What one push gave. `finish` comes once; `tokens` counts all ids so far.

    `token_ids` are the ids of this push that belong to the answer, up to and including the one
    that ended it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None
    tokens: int


class ChoiceWriter:
    def __init__(
        self, detokenizer: Detokenizer, stops: StopMatcher, end_ids: frozenset[int]
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._end_ids = end_ids
        self._tokens = 0
        self.finished = False

    def push(self, token_ids: Sequence[int], finish: FinishReason | None) -> Written:
        """Take what a step gave. `finish`: the engine's own reason to end after these ids.

        A push after the end gives an empty Written without a finish. When the result finishes by
        STOP and `finish` was None, the caller aborts the sequence in the rank.
        """
        if self.finished:
            return Written("", (), None, self._tokens)
        pieces: list[str] = []
        taken = 0
        for token_id in token_ids:
            taken += 1
            if token_id in self._end_ids:
                finish = FinishReason.STOP
                break
            pieces.append(self._stops.feed(self._detokenizer.push(token_id)))
            if self._stops.matched:
                finish = FinishReason.STOP
                break
        if finish is not None:
            pieces.append(self._stops.feed(self._detokenizer.flush()))
            pieces.append(self._stops.flush())
            if self._stops.matched:
                finish = FinishReason.STOP
            self.finished = True
        self._tokens += taken
        return Written("".join(pieces), tuple(token_ids[:taken]), finish, self._tokens)
