"""Streams of bytes: what bodies are, and JavaScript's two kinds for scripts that name them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from .values import JsObject

ENDED = object()


class ReadableStream:
    """Read once, as an async iterator or through a reader."""

    def __init__(self, source: AsyncIterable[Any]) -> None:
        self._iterator = aiter(source)
        self.locked = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        self._lock()
        return self._bytes()

    async def _bytes(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._iterator:
                yield as_bytes(piece)
        finally:
            await self.cancel()

    def getReader(self, *_: Any) -> Reader:
        self._lock()
        return Reader(self)

    async def cancel(self, *_: Any) -> None:
        """Let go of what it comes from."""
        close = getattr(self._iterator, "aclose", None)
        if close is not None:
            await close()

    def pipeThrough(self, transform: TransformStream, *_: Any) -> ReadableStream:
        return transform.follow(self)

    async def step(self) -> Any:
        """The next piece, or ENDED."""
        return await anext(self._iterator, ENDED)

    def _lock(self) -> None:
        if self.locked:
            raise OSError("this stream is read already")
        self.locked = True


class Reader:
    def __init__(self, stream: ReadableStream) -> None:
        self._stream = stream

    async def read(self) -> JsObject:
        piece = await self._stream.step()
        if piece is ENDED:
            return JsObject(done=True, value=None)
        return JsObject(done=False, value=piece)

    async def cancel(self, *_: Any) -> None:
        await self._stream.cancel()

    def releaseLock(self) -> None:
        self._stream.locked = False


class TransformStream:
    """What is written to `writable` is read from `readable`; at most one piece lies between."""

    def __init__(self, *given: Any) -> None:
        if any(one is not None for one in given):
            raise TypeError("TransformStream takes no transformer here: change what is written")
        self._queue: asyncio.Queue[Any] = asyncio.Queue(1)
        self.readable = ReadableStream(self._pieces())
        self.writable = WritableStream(self._queue)
        self._filling: asyncio.Future[None] | None = None

    @classmethod
    def new(cls, *given: Any) -> TransformStream:
        return cls(*given)

    def follow(self, source: ReadableStream) -> ReadableStream:
        """Write all of `source`; what comes out."""
        self._filling = asyncio.ensure_future(self._fill(source))
        return self.readable

    async def _fill(self, source: ReadableStream) -> None:
        writer = self.writable.getWriter()
        async for piece in source:
            await writer.write(piece)
        await writer.close()

    async def _pieces(self) -> AsyncIterator[Any]:
        while (piece := await self._queue.get()) is not ENDED:
            if isinstance(piece, BaseException):
                raise piece
            yield piece


class WritableStream:
    def __init__(self, queue: asyncio.Queue[Any]) -> None:
        self._queue = queue

    def getWriter(self) -> WritableStream:
        return self

    async def write(self, piece: Any) -> None:
        await self._queue.put(piece)

    async def close(self) -> None:
        await self._queue.put(ENDED)

    async def abort(self, reason: Any = None) -> None:
        error = reason if isinstance(reason, BaseException) else OSError(str(reason or "aborted"))
        await self._queue.put(error)

    def releaseLock(self) -> None:
        """Nothing is locked."""


def as_bytes(piece: Any) -> bytes:
    """Of a stream. Raises TypeError."""
    if isinstance(piece, str):
        return piece.encode()
    if isinstance(piece, bytes | bytearray | memoryview):
        return bytes(piece)
    raise TypeError(f"a body is made of str and bytes, and a {type(piece).__name__} came")
