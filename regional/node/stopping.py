"""How the processes of a node are asked to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class Stopping:
    """SIGTERM and SIGINT: the first asks to stop, the second not to wait any longer."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self.asked.is_set():
            self.hurried.set()
        self.asked.set()

    async def unless_stopped(self, coroutine: Coroutine[Any, Any, _T]) -> _T | None:
        """What `coroutine` gives; None when a stop signal comes first."""
        work = asyncio.create_task(coroutine)
        asked = asyncio.create_task(self.asked.wait())
        try:
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
            return await work if work.done() else None
        finally:
            work.cancel()
            asked.cancel()
