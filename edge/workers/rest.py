"""How long a Worker rests that is ended again and again for what it does. Pure.

The first end is forgiven: the next request starts it. After each further one it rests longer, until
it has answered for a while without being ended. What is deployed begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

Cause = Literal["loop", "memory", "processes", "silent", "start"]
SAID: Final[dict[Cause, str]] = {
    "loop": "held its thread for too long",
    "memory": "filled its memory",
    "processes": "started processes",
    "silent": "did not answer its host",
    "start": "did not start",
}
"""What callers are told of a cause; figures and names of limits are for its `tail`."""


@dataclass(frozen=True, slots=True)
class Rests:
    """Seconds. `first_s` after the second end in a row, then `factor` times the one before; after
    `good_s` of good conduct all is forgotten."""

    first_s: float = 1.0
    factor: float = 4.0
    most_s: float = 60.0
    good_s: float = 180.0

    def after(self, ends: int) -> float:
        """The rest after so many ends in a row."""
        if ends < 2:
            return 0.0
        powers = min(ends - 2, 64)
        return min(self.first_s * self.factor**powers, self.most_s)


class Rest(msgspec.Struct, frozen=True):
    """`until`: Unix time. `ends`: how often in a row it was ended for a cause."""

    until: float
    cause: Cause
    ends: int

    def left_s(self, now: float) -> float:
        """0 once it is over."""
        return max(0.0, self.until - now)


class Conduct:
    """Of one deployment of a Worker on one edge."""

    def __init__(self, rests: Rests) -> None:
        self._rests = rests
        self._good_s = 0.0
        self.ends = 0

    def lived(self, seconds: float, *, answered: bool) -> None:
        """A process of it has lived so long, and was not ended for a cause in that time. Only one
        that answered somebody counts: a Worker that nobody asks does nobody harm."""
        if answered:
            self._good_s += seconds
        if self._good_s >= self._rests.good_s:
            self.ends = 0

    def ended(self) -> float:
        """For a cause. For how long it rests now."""
        self._good_s = 0.0
        self.ends += 1
        return self._rests.after(self.ends)
