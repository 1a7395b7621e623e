"""How many threads a call takes: all, but one while other processes hold the cores.

Threads meet some hundred times a step. Where one of them has lost its core to another process, all
wait for it each time, and a step takes a hundred times as long. A result does not depend on the
number of threads, so it may change from call to call.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOST = 0.25
"""The share of calls' time, waited for threads without a core, that is too much."""
NEWEST = 0.25
"""The newest call's weight in it: one hiccup of a machine is not enough."""
SHORTEST_S, LONGEST_S = 0.25, 8.0
"""For how long one thread goes on alone; twice as long each time that it helped nothing to try."""


class Crew:
    """For one caller at a time."""

    def __init__(self, threads: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._threads = threads
        self._clock = clock
        self._alone_until = 0.0
        self._pause_s = SHORTEST_S
        self._began = 0.0
        self._size = threads
        self._lost = 0.0

    def begin(self) -> int:
        """A call begins: with how many threads."""
        self._began = self._clock()
        self._size = self._threads if self._began >= self._alone_until else 1
        return self._size

    def end(self, lost_ns: int) -> None:
        """It ended; its threads waited `lost_ns` in all."""
        if self._size == 1:
            return
        now = self._clock()
        share = min(1.0, lost_ns * 1e-9 / max(now - self._began, 1e-9))
        self._lost += NEWEST * (share - self._lost)
        if self._lost > LOST:
            self._lost = 0.0
            self._alone_until = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_S)
        elif now - self._alone_until > self._pause_s:  # undisturbed for as long
            self._pause_s = SHORTEST_S
