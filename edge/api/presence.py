"""Whether a caller is still there, and the words that keep its connection alive meanwhile.

Both cost a request next to nothing while all is well: one task that waits for the caller's end,
and timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from litestar.types import Receive

from core.errors import Cancelled
from edge.api.wire import Headers, Wire


async def while_there(receive: Receive, wire: Wire, work: Coroutine[None, None, None]) -> None:
    """Run `work` in this task. Raises Cancelled when the caller leaves, or reads no more."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None, "runs in a task"
    left = over = False

    def leave(listener: asyncio.Future[None] | None = None) -> None:
        nonlocal left
        if over or (listener is not None and (listener.cancelled() or wire.ended)):
            return  # after the end of an answer the server says that the caller is gone as well
        if not left:
            left = True
            task.cancel()

    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal timer
        if wire.stalled:
            leave()
        else:
            timer = loop.call_later(wire.look_s, look)

    listener = asyncio.ensure_future(_gone(receive))
    listener.add_done_callback(leave)
    look()
    try:
        await work
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise Cancelled("the caller left, or reads no more") from None
        raise
    finally:
        over = True
        if timer is not None:
            timer.cancel()
        listener.cancel()
        await asyncio.wait({listener})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Heartbeat:
    """An SSE comment after each `every_s` of silence, between events, from `start` to `stop`."""

    def __init__(self, wire: Wire, head: Callable[[], Headers], every_s: float) -> None:
        self._wire = wire
        self._head = head
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._word: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._timer = self._loop.call_later(self._every_s, self._tick)

    async def stop(self) -> None:
        """No word follows."""
        if self._timer is not None:
            self._timer.cancel()
        if self._word is not None:
            self._word.cancel()
            await asyncio.wait({self._word})

    def _tick(self) -> None:
        quiet_s = self._wire.quiet_s()
        if quiet_s >= self._every_s and (self._word is None or self._word.done()):
            self._word = self._loop.create_task(self._wire.event(self._head, b": waiting\n\n"))
            quiet_s = 0.0
        self._timer = self._loop.call_later(max(0.05, self._every_s - quiet_s), self._tick)
