"""The only way out: HTTP to the host's socket, which passes it on to the edge, the store, another
Worker or the internet. The host adds who is asking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import h11

from .headers import Headers
from .messages import REDIRECTS, FetchResponse, Request
from .streams import ReadableStream

TO_HEADER = "x-skerry-to"
"""Where a request goes: `edge`, `internet`, `store:BINDING`, `worker:BINDING`."""
REFUSED_HEADER = "x-skerry-refused"
"""Set by the host where it did not pass a request on; the body says why."""
MOST_REDIRECTS = 20
_READ = 64 << 10
_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding",
                  TO_HEADER, "upgrade"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outside:
    socket: Path

    async def ask(self, to: str, request: Request) -> FetchResponse:
        """One exchange, without following redirects. Raises OSError with the host's reason."""
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        connection = h11.Connection(h11.CLIENT)
        try:
            await _send(connection, writer, to, request)
            head = await _next(connection, reader)
            if not isinstance(head, h11.Response):
                raise OSError("the other side ended the connection")
        except BaseException:
            writer.close()
            raise
        headers = Headers([(k.decode("latin-1"), v.decode("latin-1")) for k, v in head.headers])
        stream = ReadableStream(_pieces(connection, reader, writer))
        reason = head.reason.decode("latin-1")
        answer = FetchResponse(head.status_code, reason, headers, stream)
        if headers.has(REFUSED_HEADER):
            raise OSError(await answer.text())
        answer.url = request.url
        return answer

    async def fetch(self, input: str | Request, init: Any = None, **named: Any) -> FetchResponse:
        """The internet, as the edge's policy allows it."""
        request = Request(input, init, **named)
        if urlsplit(request.url).scheme not in ("http", "https"):
            raise TypeError(f"fetch takes URLs of http and https, not {request.url[:100]!r}")
        answer = await self.ask("internet", request)
        for _ in range(MOST_REDIRECTS):
            if answer.status not in REDIRECTS or request.redirect != "follow":
                return answer
            if (location := answer.headers.get("location")) is None:
                return answer
            await answer.bytes()
            request = _redirected(request, answer.status, urljoin(request.url, location))
            answer = await self.ask("internet", request)
        raise OSError(f"more than {MOST_REDIRECTS} redirects, from {request.url[:200]}")


def path_of(text: str) -> str:
    return quote(text, safe="")


def _redirected(request: Request, status: int, url: str) -> Request:
    headers = Headers(request.headers)
    if urlsplit(url).netloc != urlsplit(request.url).netloc:
        headers.delete("authorization")
        headers.delete("cookie")
    kept = status in (307, 308)
    if not kept:
        headers.delete("content-type")
    if kept and isinstance(request._source, ReadableStream):
        raise OSError("a redirect would send a streamed body a second time")
    again = Request(url, method=request.method if kept else "GET", headers=headers,
                    redirect=request.redirect)  # fmt: skip
    again._source = request._source if kept else None
    return again


async def _send(
    connection: h11.Connection, writer: asyncio.StreamWriter, to: str, request: Request
) -> None:
    source = request._source
    fields = [(k, v) for k, v in request.headers.raw() if k.lower() not in _HOP]
    fields += [("host", urlsplit(request.url).netloc or "host"), (TO_HEADER, to)]
    fields.append(("connection", "close"))
    if isinstance(source, bytes):
        fields.append(("content-length", str(len(source))))
    elif source is not None:
        fields.append(("transfer-encoding", "chunked"))
    head = h11.Request(
        method=request.method.value,
        target=request.url.encode()
        if request.url.isascii()
        else quote(request.url, safe="%/:?&=#"),
        headers=[(k.encode("latin-1"), v.encode("latin-1", "replace")) for k, v in fields],
    )
    writer.write(connection.send(head) or b"")
    if isinstance(source, bytes):
        writer.write(connection.send(h11.Data(data=source)) or b"")
    elif source is not None:
        async for piece in source:
            writer.write(connection.send(h11.Data(data=piece)) or b"")
            await writer.drain()
    writer.write(connection.send(h11.EndOfMessage()) or b"")
    await writer.drain()


async def _next(connection: h11.Connection, reader: asyncio.StreamReader) -> Any:
    while True:
        event = connection.next_event()
        if isinstance(event, h11.InformationalResponse):
            continue
        if event is not h11.NEED_DATA:
            return event
        connection.receive_data(await reader.read(_READ))


async def _pieces(
    connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> AsyncIterator[bytes]:
    """The connection is closed with it: whoever stops reading stops what comes."""
    try:
        while True:
            event = await _next(connection, reader)
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise OSError("the answer was cut off")
    except h11.RemoteProtocolError as error:
        raise OSError(f"the answer was cut off: {error}") from error
    finally:
        writer.close()
