"""The answering side of one ASGI connection: headers once, bodies in order, one end.

Two tasks write to a stream (events and heartbeats); each write is whole events under a lock, so a
comment never lands inside one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from litestar.types import Send

from core.errors import Cancelled

STALL_S = 60.0
Headers = list[tuple[bytes, bytes]]


class Wire:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = asyncio.Lock()
        self._last = time.monotonic()
        self._ended = False
        self.started = False

    def quiet_s(self) -> float:
        """Since the last byte, or since the beginning."""
        return time.monotonic() - self._last

    async def event(self, head: Callable[[], Headers] | None, data: bytes) -> None:
        """Write a piece of a stream, after its headers where they are not out yet."""
        async with self._lock:
            if not self.started:
                assert head is not None, "a stream begins with headers"
                await self._start(200, head())
            if data:
                self._last = time.monotonic()
                await self._body(data)

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
            await self._body(body)

    async def end(self) -> None:
        """No more will come. Idempotent."""
        async with self._lock:
            if self.started and not self._ended:
                self._ended = True
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _body(self, data: bytes) -> None:
        """Waits while the caller does not read; one who never does must not hold a region."""
        try:
            async with asyncio.timeout(STALL_S):
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError as error:
            raise Cancelled(f"the caller has read nothing for {STALL_S:g} s") from error

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
