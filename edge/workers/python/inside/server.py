"""HTTP/1.1 on the two sockets of a Worker's process, by h11."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPMethod
from typing import Any

import h11

from .headers import Headers, Pairs
from .messages import BODILESS, Request, Response
from .streams import ReadableStream

_READ = 64 << 10
MOST_UNREAD_BYTES = 256 << 10
_OURS = frozenset({"connection", "content-length", "transfer-encoding"})
Answerer = Callable[[Request], Awaitable[Response]]


class Server:
    """`settle` waits for the connections that answer; idle ones are closed."""

    def __init__(self, answer: Answerer) -> None:
        self._answer = answer
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle: set[asyncio.StreamWriter] = set()
        self._closing = False

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "runs in a task"
        self._tasks.add(task)
        try:
            line = _Line(reader, writer)
            while not self._closing:
                self._idle.add(writer)
                request = await line.request()
                self._idle.discard(writer)
                if request is None:
                    return
                if not await self._one(line, request):
                    return
        except (ConnectionError, h11.ProtocolError):
            return  # the other side is gone, or speaks something else
        finally:
            self._idle.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def settle(self) -> None:
        self._closing = True
        for writer in set(self._idle):
            writer.close()
        while self._tasks - {asyncio.current_task()}:
            await asyncio.wait(self._tasks - {asyncio.current_task()})

    async def _one(self, line: _Line, request: Request) -> bool:
        """Answer; whether the connection can go on."""
        answering = asyncio.ensure_future(self._whole(line, request))
        gone = asyncio.ensure_future(line.gone())
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            answering.cancel()  # the caller has left
            await asyncio.wait({answering})
            return False
        gone.cancel()
        await asyncio.wait({gone})
        answering.result()
        return line.again()

    async def _whole(self, line: _Line, request: Request) -> None:
        response = await self._answer(request)
        await line.send(response, bodiless=request.method == HTTPMethod.HEAD)
        await line.skip_rest()


class _Line:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER)
        self._read = asyncio.Event()
        """The request's body has been read, or nobody will read it."""

    async def request(self) -> Request | None:
        """None once nothing more comes."""
        event = await self._event()
        if not isinstance(event, h11.Request):
            return None
        pairs: Pairs = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in event.headers]
        headers = Headers(pairs)
        self._read.clear()
        body = None
        if "content-length" in headers or "transfer-encoding" in headers:
            body = ReadableStream(self._body())
        else:
            await self._event()  # the end of a message without a body
            self._read.set()
        target = event.target.decode("latin-1")
        url = target if "://" in target else f"http://{headers.get('host', 'worker')}{target}"
        request = Request(url, headers=headers)
        request.method = HTTPMethod(event.method.decode())
        request._source = body
        return request

    async def send(self, response: Response, *, bodiless: bool) -> None:
        source = response._source
        fields = [pair for pair in response.headers.raw() if pair[0].lower() not in _OURS]
        if response.status in BODILESS:
            source = None
        elif isinstance(source, ReadableStream):
            fields.append(("transfer-encoding", "chunked"))
        else:
            fields.append(("content-length", str(len(source or b""))))
        head = h11.Response(
            status_code=response.status,
            reason=response.status_text.encode("latin-1", "replace"),
            headers=[(k.encode("latin-1", "replace"), v.encode("latin-1", "replace"))
                     for k, v in fields],
        )  # fmt: skip
        self._writer.write(self._http.send(head) or b"")
        if source is not None and not bodiless:
            await self._send_body(source)
        self._writer.write(self._http.send(h11.EndOfMessage()) or b"")
        await self._writer.drain()

    async def gone(self) -> None:
        """Until the other side has closed. Before that, the request's body is someone else's."""
        await self._read.wait()
        while not self._reader.at_eof():
            data = await self._reader.read(_READ)
            self._http.receive_data(data)
            if not data:
                return

    async def skip_rest(self) -> None:
        """Read what is left of a body that the Worker did not want: the other side keeps the
        connection, and would lose its next request on one that is closed under it."""
        if self._read.is_set():
            return
        left = MOST_UNREAD_BYTES
        while left > 0 and isinstance(event := await self._event(), h11.Data):
            left -= len(event.data)
        self._read.set()

    def again(self) -> bool:
        """Whether another request can follow."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            return True
        return False

    async def _send_body(self, source: bytes | ReadableStream) -> None:
        if isinstance(source, bytes):
            self._writer.write(self._http.send(h11.Data(data=source)) or b"")
            return
        await self._writer.drain()
        async for piece in source:
            self._writer.write(self._http.send(h11.Data(data=piece)) or b"")
            await self._writer.drain()

    async def _body(self) -> AsyncIterator[bytes]:
        try:
            while isinstance(event := await self._event(), h11.Data):
                yield bytes(event.data)
            if not isinstance(event, h11.EndOfMessage):
                raise OSError("the request was cut off")
        finally:
            self._read.set()

    async def _event(self) -> Any:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self._http.they_are_waiting_for_100_continue:
                go = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                self._writer.write(self._http.send(go) or b"")
            self._http.receive_data(await self._reader.read(_READ))
