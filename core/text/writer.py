"""The writer of one choice: sampled ids in, text to send out.

It decides where an answer ends in text: at an end token, which prints nothing, or where a stop
string is complete. The engine stops by ids alone, so more ids may come after that; they are
dropped. How ids fall into steps changes neither text, finish nor count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.events import TokenLogprob
from core.text.detokenizer import Detokenizer
from core.text.logprobs import LogprobLine, Scores
from core.text.stop import StopMatcher
from core.types import FinishReason


@dataclass(frozen=True, slots=True)
class Written:
    """What one push gave. `finish` comes once; `tokens` counts all ids so far.

    `token_ids` are the ids of this push that belong to the answer, up to and including the one
    that ended it. `logprobs` belong to `text`: an id's entry may come in a later push.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


class ChoiceWriter:
    """`min_tokens`: so many tokens are written before stop strings are looked for."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        end_ids: frozenset[int],
        logprobs: LogprobLine,
        *,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._end_ids = end_ids
        self._logprobs = logprobs
        self._min_tokens = min_tokens
        self._tokens = 0
        self._printed = 0
        self._shown = 0
        self.finished = False

    def push(
        self,
        token_ids: Sequence[int],
        finish: FinishReason | None,
        scores: Sequence[Scores] = (),
    ) -> Written:
        """Take what a step gave. `finish`: the engine's own reason to end after these ids.
        `scores`: one for each id, or none at all.

        A push after the end gives an empty Written without a finish. When the result finishes by
        STOP and `finish` was None, the caller aborts the sequence in the rank.
        """
        if self.finished:
            return Written("", (), None, self._tokens)
        pieces: list[str] = []
        before = self._tokens
        for place, token_id in enumerate(token_ids):
            self._tokens += 1
            ended = token_id in self._end_ids
            pieces.append(self._write(token_id, ended, scores[place] if scores else None))
            if ended or self._stops.matched:
                finish = FinishReason.STOP
                break
        if finish is not None:
            rest = self._detokenizer.flush()
            self._printed += len(rest)
            pieces.append(self._stops.feed(rest))
            pieces.append(self._stops.flush())
            if self._stops.matched:
                finish = FinishReason.STOP
            self.finished = True
        text = "".join(pieces)
        self._shown += len(text)
        out = self._logprobs.cut if finish is not None else self._logprobs.out
        return Written(
            text=text,
            token_ids=tuple(token_ids[: self._tokens - before]),
            finish=finish,
            tokens=self._tokens,
            logprobs=tuple(out(self._shown)),
        )

    def _write(self, token_id: int, ended: bool, scores: Scores | None) -> str:
        """What may go out because of it."""
        text = self._detokenizer
        entry = self._logprobs.entry(text, token_id, scores) if scores is not None else None
        piece = "" if ended else text.push(token_id)
        if entry is not None:
            self._logprobs.add(entry, self._printed, piece, text.left, silent=ended)
        self._printed += len(piece)
        if self._tokens <= self._min_tokens:
            return piece
        return self._stops.feed(piece)
