"""Run a command, showing that it lives: one line that ends in its time. Standard library only."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

TAIL = 12
"""Lines of output kept for the case of failure."""


class Progress:
    """On a terminal the line is redrawn twice a second, elsewhere it is written once at the end."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()

    def run(
        self, what: str, command: Sequence[str], *, env: Mapping[str, str], cwd: Path
    ) -> list[str] | None:
        """None when `command` succeeded, else the last lines of its output. The process has ended
        when this returns or raises."""
        started = time.monotonic()
        tail: deque[str] = deque(maxlen=TAIL)
        if not self._live:
            self._out.write(f"  {what} … ")
            self._out.flush()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            text=True, errors="replace", env=dict(env), cwd=cwd,
        ) as process:  # fmt: skip
            reader = threading.Thread(target=_collect, args=(process.stdout, tail), daemon=True)
            reader.start()
            try:
                while reader.is_alive():
                    reader.join(0.5)
                    self._draw(what, started, tail)
                process.wait()
            except BaseException:
                process.kill()
                raise
        self._finish(what, time.monotonic() - started, process.returncode)
        return None if process.returncode == 0 else list(tail)

    def _draw(self, what: str, started: float, tail: deque[str]) -> None:
        if not self._live:
            return
        spent = time.monotonic() - started
        latest = tail[-1].strip() if tail else ""
        self._out.write(f"\r\x1b[K  {what} … {spent:.0f} s  \x1b[2m{latest[:50]}\x1b[0m")
        self._out.flush()

    def _finish(self, what: str, spent: float, code: int) -> None:
        word = f"{spent:.1f} s" if code == 0 else "failed"
        self._out.write(f"\r\x1b[K  {what} … {word}\n" if self._live else f"{word}\n")
        self._out.flush()


def _collect(stream: TextIO | None, tail: deque[str]) -> None:
    for line in stream or ():
        if line.strip() and not line.startswith("WARNING: Location"):
            tail.append(line.rstrip())
