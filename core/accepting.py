"""Taking in whoever comes to a listening socket, also while there is no room for another one.

`accept` fails where the process or the machine is out of descriptors or memory, and who came stays
in the queue: a loop that asks again at once would spin, and one that gives up would be deaf from
then on. So there is a pause, until somebody has left.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable

_log = logging.getLogger("skerry.accept")

PAUSE_S = 0.1
"""Before the next try where there is no room."""
SPELL_S = 10.0
"""Failures that are not further apart than this are one spell, which is spoken of once."""
AT_ONCE = 64
"""Callers taken in before anything else is done."""

_GONE = {
    getattr(errno, name)
    for name in (
        "ECONNABORTED", "ECONNRESET", "EPROTO", "ENETDOWN", "ENETUNREACH", "EHOSTDOWN",
        "EHOSTUNREACH", "ENOPROTOOPT", "ENONET", "ETIMEDOUT",
    )
    if hasattr(errno, name)
}  # fmt: skip
"""Faults of the connection that was taken from the queue: Linux tells them here."""
_NO_LISTENER = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP}


class Spell:
    """What follows from an `accept` that failed. `of` names the listener in the log."""

    def __init__(self, of: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._of = of
        self._clock = clock
        self._failed = float("-inf")

    def pause_s(self, error: OSError) -> float:
        """How long to wait before the next try; 0 where whoever came has gone again. Raises `error`
        where there is no listener to try."""
        if error.errno in _GONE:
            return 0.0
        if error.errno in _NO_LISTENER:
            raise error
        now = self._clock()
        if now - self._failed > SPELL_S:
            _log.error("no room for another connection at=%s why=%s", self._of, error.strerror)
        self._failed = now
        return PAUSE_S


class Accepting:
    """Gives each caller of `listener` to `welcome`, from the running loop, until `close`, which
    closes the listener."""

    def __init__(
        self, listener: socket.socket, welcome: Callable[[socket.socket], None], *, of: str
    ) -> None:
        self._listener = listener
        self._welcome = welcome
        self._spell = Spell(of)
        self._loop = asyncio.get_running_loop()
        self._pausing: asyncio.TimerHandle | None = None
        self._open = True
        listener.setblocking(False)
        self._listen()

    def take_in(self) -> None:
        """All who wait in the queue, as far as there is room."""
        while self._accept():
            pass

    def close(self) -> None:
        """Idempotent."""
        if not self._open:
            return
        self._open = False
        self._rest()
        self._listener.close()

    def _accept(self) -> bool:
        """Whether there may be more."""
        for _ in range(AT_ONCE):
            try:
                caller, _ = self._listener.accept()
            except BlockingIOError:
                return False  # nobody, or another process that listens here was quicker
            except OSError as error:
                if self._pauses(error):
                    return False
            else:
                self._welcome(caller)
        return True

    def _pauses(self, error: OSError) -> bool:
        """Raises `error` where no later try can help, and none is made then."""
        try:
            pause_s = self._spell.pause_s(error)
        except OSError:
            self._rest()
            raise
        if pause_s:
            self._rest()
            self._pausing = self._loop.call_later(pause_s, self._listen)
        return pause_s > 0

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _rest(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        if self._pausing is not None:
            self._pausing.cancel()
