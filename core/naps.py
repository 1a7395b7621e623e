"""Waits of those who watch others, and how they tell that it was they who were away.

A process that was frozen (stopped, a laptop asleep, starved of its CPU) wakes with every limit
passed and with everything that it should have heard still unread. Who overslept reads first and
judges at its next look.
"""

from __future__ import annotations

import asyncio
import time

OVERSLEPT_S = 1.0
"""A wait that took so much longer than it was to: nothing that a busy loop does takes as long."""


class Nap:
    """One wait of `seconds`, from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._due = time.monotonic() + seconds

    @property
    def overslept(self) -> bool:
        """Asked at its end."""
        return time.monotonic() - self._due > OVERSLEPT_S


async def nap(seconds: float) -> bool:
    """Sleep; False for who overslept."""
    one = Nap(seconds)
    await asyncio.sleep(seconds)
    return not one.overslept
