"""The answering side of one ASGI connection: headers once, bodies in order, one end.

Two tasks write to a stream (events and heartbeats); each write is whole events under a lock, so a
comment never lands inside one. A write waits while the caller does not read: nothing piles up here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from litestar.types import Send

STALL_S = 60.0
"""A caller who reads nothing for so long must not hold a region."""
Headers = list[tuple[bytes, bytes]]


class Wire:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = asyncio.Lock()
        self._last = time.monotonic()
        self._writing = False
        self.started = False
        self.ended = False

    def quiet_s(self) -> float:
        """Since the last byte, or since the beginning."""
        return time.monotonic() - self._last

    @property
    def look_s(self) -> float:
        """How often to ask whether it is stalled."""
        return STALL_S / 2

    @property
    def stalled(self) -> bool:
        """Whether a write has waited for too long."""
        return self._writing and self.quiet_s() >= STALL_S

    async def event(
        self, head: Callable[[], Headers] | None, data: bytes, *, last: bool = False
    ) -> None:
        """Write a piece of a stream, after its headers where they are not out yet."""
        async with self._lock:
            if not self.started:
                assert head is not None, "a stream begins with headers"
                await self._start(200, head())
            if data or last:
                await self._body(data, more=not last)

    async def whole(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Write a JSON answer; `end` follows, at once or after a caller has been drained."""
        async with self._lock:
            await self._start(
                status,
                [
                    (b"content-type", b"application/json"),
                    (b"content-length", str(len(body)).encode()),
                    *headers,
                ],
            )
            await self._body(body, more=True)

    async def end(self) -> None:
        """No more will come. Idempotent."""
        async with self._lock:
            if self.started and not self.ended:
                await self._body(b"", more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        self._last = time.monotonic()
        self._writing, self.ended = True, not more
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._writing = False

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
