"""Ctrl-C in the middle of a deploy: what was is put back first."""

from __future__ import annotations

import signal
import time

from core.errors import ConfigError

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """A block in which signals ask for a way back, once; another one ends at once. For the main
    thread."""

    def __init__(self) -> None:
        self._asked = self._taken = False

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._signalled) for number in _NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pause(self, seconds: float) -> bool:
        """For `Asking`. Never True, which means a world that ends. Raises ConfigError when it was
        asked for a way back."""
        end = time.monotonic() + seconds
        while True:
            if self._asked and not self._taken:
                self._taken = True
                raise ConfigError("stopped")
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, 0.1))

    def _signalled(self, number: int, frame: object) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
