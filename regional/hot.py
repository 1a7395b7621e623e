"""Which prompt beginnings a region is asked for often: counts in bounded memory, pure.

A table of ids with counts that decay with a mean age of two minutes (the *window*). An id enters
only after the id before it in its prompt, four new ones a prompt at most, so that the unique rest
of a long prompt does not fill the table; at twice its size the table is cut back by subtracting
the middle count from all (Misra-Gries).

**Error.** A count is never too high. It is too low by at most what the cuts subtracted,
`lost` ≤ increments in the window ÷ (size + 1), and by ⌈depth ÷ 4⌉ prompts for each time that the id
had to be let in: once, and again after a cut that left nothing of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

WINDOW_S = 120.0
TICK_S = 5.0
SIZE = 2048
NEW_IN_A_PROMPT = 4
PUBLISHED = 512
"""Ids in one publication at most: 8 kB."""
_LEAST = 0.25
"""A count below this is forgotten."""


class HotCounter:
    """Time is passed in; it must not go back."""

    def __init__(self, *, size: int = SIZE, window_s: float = WINDOW_S) -> None:
        self._size = size
        self._window_s = window_s
        self._counts: dict[bytes, float] = {}
        self._decayed_at: float | None = None
        self.total = 0.0
        """Prompts in the window."""
        self.lost = 0.0
        """The most that any count is too low by because the table was cut."""

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, ids: Sequence[bytes], now: float) -> None:
        """One prompt with the chain `ids`."""
        self._decay(now)
        counts, new = self._counts, 0
        self.total += 1.0
        for one in ids:
            known = counts.get(one)
            if known is None:
                new += 1
                if new > NEW_IN_A_PROMPT:
                    break
                known = 0.0
            counts[one] = known + 1.0
        if len(counts) > 2 * self._size:
            self._cut()

    def frequent(self, share: float, now: float) -> list[tuple[bytes, float]]:
        """Ids that at least `share` of the window's prompts, and at least one, begin with; the
        most frequent `PUBLISHED` of them."""
        self._decay(now)
        least = max(1.0, share * self.total)
        found = [(one, count) for one, count in self._counts.items() if count >= least]
        if len(found) > PUBLISHED:
            found = heapq.nlargest(PUBLISHED, found, key=lambda pair: pair[1])
        return found

    def _cut(self) -> None:
        middle = heapq.nlargest(self._size + 1, self._counts.values())[-1]
        self._counts = {one: c - middle for one, c in self._counts.items() if c > middle}
        self.lost += middle

    def _decay(self, now: float) -> None:
        if self._decayed_at is None:
            self._decayed_at = now
        ticks = int((now - self._decayed_at) / TICK_S)
        if ticks <= 0:
            return
        self._decayed_at += ticks * TICK_S
        left = math.exp(-ticks * TICK_S / self._window_s)
        self.total *= left
        self.lost *= left
        self._counts = {o: c * left for o, c in self._counts.items() if c * left >= _LEAST}
