"""A lock between processes that the kernel gives back when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.errors import LimitsUnavailable

LOCK_S = 0.5
"""Longest wait: a process that was stopped while holding the lock must not stop us too."""
_SPINS, _NAP_S = 50, 50e-6
"""It is held for tens of microseconds: first give way, then nap as briefly as the kernel can."""


class KernelLock:
    """`path`: an empty file, made when missing."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises LimitsUnavailable."""
        self._take()
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _take(self) -> None:
        gives_up = time.monotonic() + LOCK_S
        spins = 0
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > gives_up:
                    raise LimitsUnavailable("the ledger of limits is held too long") from None
                spins += 1
                if spins < _SPINS:
                    os.sched_yield()
                else:
                    time.sleep(_NAP_S)
            else:
                return
