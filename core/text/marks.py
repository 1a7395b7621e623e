"""Private characters that show, in a rendered text, which parts callers wrote.

They are chosen per conversation from those that occur in none of its texts, so that whatever a
caller sends is kept and nothing a caller sends is a mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.errors import InvalidRequest

Mark = Callable[[str], str]

_PRIVATE = range(0x100000, 0x10FFFE)
PRIVATE = re.compile(f"[{chr(_PRIVATE[0])}-{chr(_PRIVATE[-1])}]")
_CORE = re.compile(r"\S(?:.*\S)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a rendered chat. In an `own` one, the template's, control tokens are meant."""

    text: str
    own: bool


@dataclass(frozen=True, slots=True)
class Marks:
    start: str
    end: str
    split: str

    def wrap(self, text: str) -> str:
        """Mark all of `text` but its outer white space, which a template may trim."""
        return _CORE.sub(lambda found: f"{self.start}{found[0]}{self.end}", text)

    def drop(self, text: str) -> str:
        return re.sub(f"[{self.start}{self.end}{self.split}]", "", text)

    def wrapped_pieces(self, text: str) -> list[Piece] | None:
        """The pieces between the marks of `wrap`; None when a template tore a pair apart."""
        pieces: list[Piece] = []
        own = True
        for part in re.split(f"([{self.start}{self.end}])", text):
            if part not in (self.start, self.end):
                if part:
                    pieces.append(Piece(part, own))
            elif own is not (part == self.start):
                return None
            else:
                own = not own
        return pieces if own else None


def free_marks(used: set[str]) -> Marks:
    """Marks that are not among the private characters `used`."""
    free = [char for char in map(chr, _PRIVATE[: len(used) + 3]) if char not in used][:3]
    if len(free) < 3:
        raise InvalidRequest("messages use every private character there is", param="messages")
    return Marks(*free)


class Breaker:
    """Breaks what is a control token, or may be a part of one at either end of a text."""

    def __init__(self, controls: Sequence[str]) -> None:
        longest_first = sorted(controls, key=len, reverse=True)
        self._whole = re.compile(
            "|".join(map(re.escape, longest_first)) or "(?!)",
            re.IGNORECASE,  # a template may change the case
        )
        self._controls = tuple(controls)
        self._tails = {text[cut:] for text in controls for cut in range(1, len(text))}
        self._heads = {text[:cut] for text in controls for cut in range(1, len(text))}
        self._sizes = range(1, max(map(len, controls), default=0))

    def mark(self, text: str, split: str) -> str:
        text = self._whole.sub(lambda found: found[0][0] + split + found[0][1:], text)
        start = text.lstrip()
        if self._may_go_on(start):
            text = text[: len(text) - len(start)] + split + start
        end = text.rstrip()
        if any(end[-size:] in self._heads for size in self._sizes):
            text = end + split + text[len(end) :]
        return text

    def _may_go_on(self, text: str) -> bool:
        """What stands before `text` could make a control token of its beginning, or of it all."""
        core = text.rstrip()
        return any(text[:size] in self._tails for size in self._sizes) or (
            bool(core) and any(core in control for control in self._controls)
        )
