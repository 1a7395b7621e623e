"""The relay's own HTTP/1.1 client: a request at a time on a warm connection, the body as it comes.

A general client costs more for one event than all the rest of the relay: here what one read of the
socket brought wakes the reader once, deadlines and silence are looked at by one timer a request
rather than one a read, and a connection outlives a request that was given up. Parsing is
httptools'. Nothing here knows what is in a body.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

from core.address import split_address
from core.errors import IncompleteStream, RegionUnavailable, RequestError

CONNECT_S = 2.0
IDLE_S = 60.0
"""Less than a region keeps idle connections for."""
LEAVE_S, LEAVE_BYTES = 1.0, 256 << 10
"""A given-up answer that has not ended within these loses its connection."""
HIGH_BYTES = 64 << 10
"""What may lie unread before the sender is made to wait."""
LOOK_S = 1.0
"""How often a quiet answer is looked at."""
OVERSLEPT_S = 1.0
"""A timer so late says that this process was away, and nothing of the other side."""

Look = Callable[[], RequestError | None]
"""Asked of an answer that has been quiet: what to end it with, if anything."""


@dataclass(slots=True)
class Head:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)


class Stream(asyncio.Protocol):
    """A connection. `ask`, then `read` until b"", then `leave`; in turn, by one task at a time."""

    def __init__(self, streams: Streams, address: str) -> None:
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._address = address
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._unread = 0
        self._paused = False
        self._head = Head()
        self._headed = self._complete = self._leaving = self._keep = False
        self._error: RequestError | None = None
        self._heard = False
        """Whether anything came since the last look."""
        self._look: Look = lambda: None
        self._deadline = self._due = 0.0
        self.closed = False
        self.silent = True
        """No byte of an answer has come yet."""

    async def ask(self, request: bytes, *, look: Look, deadline_s: float) -> Head:
        """Send `request`. Raises what `look` says, RegionUnavailable when the connection ends."""
        assert self._transport is not None, "asked once connected"
        self._head = Head()
        self._headed = self._complete = False
        self.silent = True
        self._look, self._deadline = look, self._loop.time() + deadline_s
        self._wind()
        self._transport.write(request)
        while not self._headed:
            if self._error is not None:
                raise self._error
            if self.closed:
                raise RegionUnavailable("it closed the connection without an answer")
            await self._more()
        return self._head

    async def read(self) -> bytes:
        """What has come, at least one byte; b"" at the end. Raises IncompleteStream, and what
        `look` says."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._complete:
                return b""
            if self.closed:
                raise IncompleteStream("the stream was cut")
            await self._more()
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._unread = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def leave(self) -> None:
        """Nobody reads on. What still comes is thrown away, and the connection kept if the answer
        ends soon."""
        self._leaving = True
        self._pieces.clear()
        self._unread = 0
        self._unwind()
        if self.closed or self._transport is None:
            return
        if self._complete:
            self._retire()
            return
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        self._timer = self._loop.call_later(LEAVE_S, self.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def take_up(self) -> None:
        """Out of the pool, for the next request."""
        self._unwind()
        self._leaving = False
        self._unread = 0
        self._error = None

    def _retire(self) -> None:
        self._unwind()
        if self._keep and self._error is None:
            self._timer = self._loop.call_later(IDLE_S, self.abort)
            self._streams.give_back(self._address, self)
        else:
            self.abort()

    async def _more(self) -> None:
        self._waiter = waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _wind(self) -> None:
        now = self._loop.time()
        self._heard = False
        self._due = min(now + LOOK_S, max(self._deadline, now))
        self._timer = self._loop.call_at(self._due, self._tick)

    def _unwind(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        overslept = self._loop.time() - self._due > OVERSLEPT_S
        late = self._loop.time() >= self._deadline
        quiet = self._waiter is not None and not self._heard and not overslept
        if self._error is None and (late or quiet):
            self._error = self._look()
            if self._error is not None:
                self._wake()
                return
        self._wind()

    # ---- the transport's and the parser's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by inheritance
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._leaving and self._complete:
            self.abort()  # words without a question
            return
        self._heard, self.silent = True, False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._error = RegionUnavailable("it does not speak HTTP")
            self.abort()
        if self._leaving:
            if self._complete:
                self._retire()
            elif self._unread > LEAVE_BYTES:
                self.abort()
            return
        if self._unread > HIGH_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._unwind()
        self._streams.lost(self._address, self)
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._head.status = self._parser.get_status_code()
        self._headed = True

    def on_body(self, body: bytes) -> None:
        self._unread += len(body)
        if not self._leaving:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._complete, self._keep = True, self._parser.should_keep_alive()


class Streams:
    """Warm connections to all regions, over `tls` where it is given. `close` ends them."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._idle: dict[str, list[Stream]] = {}
        self._open: set[Stream] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    async def open(
        self, address: str, request: bytes, *, look: Look, deadline_s: float
    ) -> tuple[Stream, Head]:
        """Send `request` and wait for the head of its answer. Raises RequestError."""
        while True:
            stream, warm = self._warm(address), True
            if stream is None:
                stream, warm = await self._connect(address), False
            try:
                return stream, await stream.ask(request, look=look, deadline_s=deadline_s)
            except RegionUnavailable:
                stream.abort()
                if warm and stream.closed and stream.silent:
                    continue  # the other side had closed it while it was idle
                raise
            except BaseException:
                stream.leave()
                raise

    @property
    def idle(self) -> int:
        return sum(map(len, self._idle.values()))

    def give_back(self, address: str, stream: Stream) -> None:
        self._idle.setdefault(address, []).append(stream)

    def lost(self, address: str, stream: Stream) -> None:
        self._open.discard(stream)
        if not self._open:
            self._none_open.set()
        if stream in self._idle.get(address, ()):
            self._idle[address].remove(stream)

    async def close(self) -> None:
        for stream in tuple(self._open):
            stream.abort()
        await self._none_open.wait()

    def _warm(self, address: str) -> Stream | None:
        idle = self._idle.get(address, [])
        while idle:
            stream = idle.pop()
            if not stream.closed:
                stream.take_up()
                return stream
        return None

    async def _connect(self, address: str) -> Stream:
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, stream = await loop.create_connection(
                    lambda: Stream(self, address), host, port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no connection within {CONNECT_S:g} s"
            raise RegionUnavailable(f"it is not reached: {why}") from error
        self._open.add(stream)
        self._none_open.clear()
        return stream
