"""What a caller sends to a Worker, and whether the caller is still there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import cast

from litestar.types import HTTPReceiveMessage, Receive

from core.errors import BodyTooLarge, Cancelled, RequestError

MAX_BODY_BYTES = 100 << 20
SMALL_BODY_BYTES = 64 << 10
"""A body up to this is sent at once; larger ones are passed on as they come."""


class Upload:
    """The caller's body, as it comes; then whether the caller is still there."""

    def __init__(self, receive: Receive, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._receive = receive
        size = _declared(headers)
        self.has_body = size > 0
        self.small = size <= SMALL_BODY_BYTES
        self.error: RequestError | None = None
        """Why it broke off."""
        self._whole: bytes | None = None
        self._done = asyncio.Event()
        if not self.has_body:
            self._done.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises Cancelled, BodyTooLarge."""
        size = 0
        try:
            while True:
                message = cast("HTTPReceiveMessage", await self._receive())
                if message["type"] != "http.request":
                    self.error = Cancelled("the caller left before the body was complete")
                    raise self.error
                size += len(message["body"])
                if size > MAX_BODY_BYTES:
                    self.error = BodyTooLarge(f"the body is over {MAX_BODY_BYTES >> 20} MB")
                    raise self.error
                if message["body"]:
                    yield message["body"]
                if not message["more_body"]:
                    return
        finally:
            self._done.set()

    async def whole(self) -> bytes:
        """All of it at once, as often as it is asked for. Raises Cancelled, BodyTooLarge."""
        if self._whole is None:
            self._whole = b"".join([piece async for piece in self.pieces()])
        return self._whole

    async def left(self) -> None:
        """Returns when the caller is gone."""
        await self._done.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _declared(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """How long the body will be; more than any where that is not said."""
    size = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return MAX_BODY_BYTES + 1
        if name == b"content-length" and value.isdigit():
            size = int(value)
    return size
