"""What a Worker said, for whoever asks its `tail` and for nobody else: bounded, in memory.

Of a Worker that says too much the rest is thrown away unread, so that a flood costs its host next
to nothing and does not wash away what came before.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import msgspec

from edge.workers.runtime import Run

LINES, LINE_BYTES = 1000, 8 << 10
"""Kept of each Worker."""
BYTES_PER_S, BURST_BYTES = 32 << 10, 128 << 10
"""Read of a Worker's output; what goes beyond is thrown away."""
QUEUE = 2000
"""Lines that a slow reader of a tail may be behind; then it misses some."""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`level`: log, info, debug, warn, error of the Worker's console; host: said by us."""

    at: float
    version: str
    level: str = "log"
    message: str = ""
    run: Run | None = None


class LogBook:
    """The last lines of one Worker, and who follows them."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._said: deque[Line] = deque(maxlen=LINES)
        self._runs: deque[Line] = deque(maxlen=LINES // 4)
        self._told: deque[Line] = deque(maxlen=LINES // 4)
        """By us: what a Worker says and does pushes nothing of it out."""
        self._followers: set[asyncio.Queue[Line]] = set()

    def say(self, version: str, level: str, message: str, run: Run | None = None) -> None:
        text = message if len(message) <= LINE_BYTES else message[:LINE_BYTES] + "…"
        line = Line(at=self._clock(), version=version, level=level, message=text, run=run)
        {"host": self._told, "run": self._runs}.get(level, self._said).append(line)
        for follower in self._followers:
            if not follower.full():
                follower.put_nowait(line)

    def last(self, count: int) -> list[Line]:
        lines = heapq.merge(self._told, self._runs, self._said, key=lambda line: line.at)
        return list(lines)[-count:] if count else []

    async def follow(self) -> AsyncIterator[Line]:
        """What is said from the first step on. Ends when it is closed."""
        queue: asyncio.Queue[Line] = asyncio.Queue(QUEUE)
        self._followers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._followers.discard(queue)


class Budget:
    """Whether what came is to be read. Pure."""

    def __init__(self, now: float) -> None:
        self._left = float(BURST_BYTES)
        self._short = False
        self._at = now

    def spend(self, count: int, now: float) -> bool:
        """Whether `count` bytes are paid for. Once they are not, none are until a quarter of the
        burst has come together again."""
        self._left = min(self._left + (now - self._at) * BYTES_PER_S, BURST_BYTES)
        self._at = now
        if self._left < (BURST_BYTES / 4 if self._short else count):
            self._short = True
            return False
        self._short = False
        self._left -= count
        return True
