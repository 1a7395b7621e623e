"""Which batch sizes of decode steps have a graph, which one a step uses, and what comes next.

A graph serves its size and, with rows of padding, every smaller one. Pure: ranks that see the same
steps and captures come to the same answers, so all of them capture in the same order.
"""

from __future__ import annotations

from collections import Counter

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes worth a graph of their own: at most a third of the rows are padding from 8 on."""
WORTH = 2
"""A size is captured once so many steps have asked for it: many sizes are passed through once."""
OVERDUE = 200
"""From so many on it is captured in between: a device that is never idle needs graphs the most."""


class GraphSizes:
    """`most`: rows of the largest step that may come."""

    def __init__(self, most: int) -> None:
        self._ladder = tuple(size for size in LADDER if size < most)
        self._ladder += () if most > LADDER[-1] else (most,)
        self._captured: set[int] = set()
        self._failed: set[int] = set()
        self._asked: Counter[int] = Counter()

    def use(self, rows: int) -> int | None:
        """The size of the graph for a decode step of so many rows, padded to it; None: there is
        none yet, or ever. Counts as asking for the right one."""
        wanted = self._step(rows)
        if wanted is None:
            return None
        self._asked[wanted] += 1
        return min((size for size in self._captured if size >= rows), default=None)

    def next(self, *, idle: bool) -> int | None:
        """What to capture now, the most asked for first; None: nothing is worth it. `idle`: nothing
        waits for it meanwhile."""
        least = WORTH if idle else OVERDUE
        missing = [
            (-count, size)
            for size, count in self._asked.items()
            if count >= least and size not in self._captured | self._failed
        ]
        return min(missing)[1] if missing else None

    def captured(self, size: int) -> None:
        self._captured.add(size)

    def failed(self, size: int) -> None:
        """It is not tried again: a larger one serves, or none."""
        self._failed.add(size)

    def _step(self, rows: int) -> int | None:
        return next((size for size in self._ladder if size >= rows), None)
