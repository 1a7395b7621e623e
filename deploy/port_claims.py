"""Ports that this machine's worlds keep apart among themselves, by locks on the bytes of one file.

Between choosing a port and the process that listens on it lie seconds. Ports come from below the
range that the system gives to connections, so that no caller's socket gets one meanwhile; and
another world that chooses at the same moment sees the lock.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOWEST, HIGHEST = 15_000, 32_000
"""Systems give outgoing connections ports from 32,768 (Linux) or 49,152 on."""


class Claims:
    """`take` ports; they are free for others after `close`, or when this process ends."""

    def __init__(self, folder: Path | None = None) -> None:
        where = folder or Path(tempfile.gettempdir())
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(where / f"skerry-ports-{os.getuid()}", flags, 0o600)

    def take(self, port: int) -> bool:
        """Whether no other world has it."""
        try:
            _lock(self._file, port)
        except BlockingIOError:
            return False
        return True

    def give(self, port: int) -> None:
        """Back to whoever takes it next; nothing for one that is not held here."""
        if self._file >= 0:
            _lock(self._file, port, fcntl.F_UNLCK)

    def close(self) -> None:
        file, self._file = self._file, -1
        os.close(file)


def shuffled() -> Iterator[int]:
    """Ports to try, beginning anywhere."""
    start = random.randrange(LOWEST, HIGHEST)
    yield from range(start, HIGHEST)
    yield from range(LOWEST, start)


def _lock(file: int, byte: int, how: int = fcntl.F_WRLCK) -> None:
    """Raises BlockingIOError. On Linux the lock belongs to the open file rather than to the
    process, so that two worlds of one process are kept apart too."""
    kind = getattr(fcntl, "F_OFD_SETLK", None)
    if kind is None:
        flag = fcntl.LOCK_UN if how == fcntl.F_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB
        fcntl.lockf(file, flag, 1, byte)
        return
    wanted = struct.pack("hhqqi4x", how, os.SEEK_SET, byte, 1, 0)
    fcntl.fcntl(file, kind, wanted)
