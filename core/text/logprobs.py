"""Log probabilities in step with the text: an entry goes out when its token's text has.

A token that only a stop string holds back waits with its text, so no part of a stop string leaks
through an entry. Of a token that the stop string cut, the entry has the bytes before the cut; whole
tokens of the stop string have none. So the bytes of all entries are the answer, as UTF-8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from core.events import TokenLogprob
from core.text.detokenizer import Detokenizer, TokenTable


class Scores(Protocol):
    """What an engine says of a sampled token: see core.engine.plan."""

    @property
    def logprob(self) -> float: ...
    @property
    def top_ids(self) -> Sequence[int]: ...
    @property
    def top_logprobs(self) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Its text lies between the answer's characters `start` and `end`; `piece` is what the token
    printed, after which `left` bytes waited for the rest of their character."""

    entry: TokenLogprob
    start: int
    end: int
    piece: str
    left: int


class LogprobLine:
    """The entries of one answer. `printed` and `shown` count characters of the answer."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._waiting: deque[_Waiting] = deque()

    def entry(self, text: Detokenizer, token_id: int, scores: Scores) -> TokenLogprob:
        """Before `token_id` is pushed into `text`."""
        ranked = zip(scores.top_ids, scores.top_logprobs, strict=True)
        top = tuple(self._one(text, other, value) for other, value in ranked)
        return self._one(text, token_id, scores.logprob, top)

    def add(
        self, entry: TokenLogprob, printed: int, piece: str, left: int, *, silent: bool
    ) -> None:
        """The token printed `piece` after the first `printed` characters; `silent`: it ended the
        answer and prints nothing, whatever its bytes are."""
        if silent:
            entry = msgspec.structs.replace(entry, utf8=b"")
        end = printed + len(piece) + (left > 0)
        self._waiting.append(_Waiting(entry, printed, end, piece, left))

    def out(self, shown: int) -> list[TokenLogprob]:
        """Entries whose text is among the first `shown` characters."""
        given: list[TokenLogprob] = []
        while self._waiting and self._waiting[0].end <= shown:
            given.append(self._waiting.popleft().entry)
        return given

    def cut(self, shown: int) -> list[TokenLogprob]:
        """The rest of an answer that ends after `shown` characters, before all that waits."""
        given = self.out(shown)
        for one in self._waiting:
            if one.start < shown:
                lost = len(one.piece[shown - one.start :].encode()) + one.left
                kept = one.entry.utf8[: max(0, len(one.entry.utf8) - lost)]
                given.append(msgspec.structs.replace(one.entry, utf8=kept))
        self._waiting.clear()
        return given

    def _one(
        self,
        text: Detokenizer,
        token_id: int,
        logprob: float,
        top: tuple[TokenLogprob, ...] = (),
    ) -> TokenLogprob:
        utf8 = text.spell(token_id)
        token = utf8.decode(errors="backslashreplace") or self._table.name(token_id)
        return TokenLogprob(token=token, utf8=utf8, logprob=logprob, top=top)
