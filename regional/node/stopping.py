"""How the processes of a node are asked to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from core.orders import RETIRE

_T = TypeVar("_T")


class Stopping:
    """SIGTERM and SIGINT: the first asks to stop, the second not to wait any longer. RETIRE: to
    stop as soon as nobody needs it any more."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self.retired = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(RETIRE, self.retired.set)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self.asked.is_set():
            self.hurried.set()
        self.asked.set()

    async def unless_stopped(self, coroutine: Coroutine[Any, Any, _T]) -> _T | None:
        """What `coroutine` gives; None when any of the signals comes first."""
        work = asyncio.create_task(coroutine)
        ends = [asyncio.create_task(one.wait()) for one in (self.asked, self.retired)]
        try:
            await asyncio.wait({work, *ends}, return_when=asyncio.FIRST_COMPLETED)
            return await work if work.done() else None
        finally:
            for task in (work, *ends):
                task.cancel()
