"""Whether a worker still answers. One that hangs keeps its share of the port's connections, so it
has to end: whoever is given to it would wait for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_QUESTION = b"GET /healthz HTTP/1.0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Patience:
    """A worker is asked each `every_s`, may be silent for `silent_s`, and for `starting_s` until it
    has answered once."""

    every_s: float = 2.0
    silent_s: float = 10.0
    starting_s: float = 60.0


PATIENCE = Patience()


class Silence:
    """How long a worker has not answered. Pure.

    Time in which it was not asked counts as one turn at most: after a stop of the whole machine, or
    of this process, a worker is not to blame.
    """

    def __init__(self, patience: Patience, now: float) -> None:
        self._patience = patience
        self._asked_at = now
        self._heard = False
        self.seconds = 0.0

    def asked(self, answered: bool, now: float) -> bool:
        """Whether the worker has been silent for too long. A turn is a question and a rest."""
        turn_s = min(now - self._asked_at, 2 * self._patience.every_s)
        self._asked_at = now
        self._heard = self._heard or answered
        self.seconds = 0.0 if answered else self.seconds + turn_s
        limit_s = self._patience.silent_s if self._heard else self._patience.starting_s
        return self.seconds >= limit_s


async def hangs(where: Path, patience: Patience, clock: Callable[[], float]) -> float:
    """Ask the worker whose socket is `where` until it has been silent for too long. Returns for how
    long, in seconds."""
    silence = Silence(patience, clock())
    while True:
        answered = await answers(where, patience.every_s)
        if silence.asked(answered, clock()):
            return silence.seconds
        await asyncio.sleep(patience.every_s)


async def answers(where: Path, within_s: float) -> bool:
    """Whether the process at the Unix socket `where` says anything; any word will do."""
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_unix_connection(str(where))
            try:
                writer.write(_QUESTION)
                return bool(await reader.read(1))
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
