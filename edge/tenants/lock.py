"""A lock between processes that the kernel gives back when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from core.errors import LimitsUnavailable

LOCK_S = 0.5
"""Longest wait: a process that was stopped while holding the lock must not stop us too."""
_SPINS, _NAP_S = 50, 50e-6
"""It is held for some microseconds: first give way, then nap as briefly as the kernel can."""


class KernelLock:
    """`path` is made when missing, and not read."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Idempotent. What is held is given back."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def held(self) -> KernelLock:
        """For `with`, which raises LimitsUnavailable. Not from within itself."""
        return self

    def __enter__(self) -> None:
        if not self.tried():
            self._wait()

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def tried(self) -> bool:
        """Whether it is ours now, until `close`."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _wait(self) -> None:
        gives_up = time.monotonic() + LOCK_S
        spins = 0
        while not self.tried():
            if time.monotonic() > gives_up:
                raise LimitsUnavailable("the ledger of limits is held too long")
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
            else:
                time.sleep(_NAP_S)
