"""Who asks a router, over its own wire, as an edge does: as cheap as can be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools
import msgspec

from core.address import split_address
from core.events import Accepted, Delta, Done, Fault, Moved, event_decoder
from core.types import WIRE_VERSION, GenerateRequest
from loadtest.region.cast import SECRET


class AskFailed(Exception):
    """A request had no answer."""


@dataclass(slots=True)
class Told:
    """What one answer brought. Moments by `time.monotonic`."""

    began: float
    times: list[float] = field(default_factory=list)
    """Of each token."""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    prefill: str | None = None
    decode: str = ""
    reason: str = ""
    done: Done | None = None

    @property
    def first_s(self) -> float:
        return self.times[0] - self.began


class Stream(asyncio.Protocol):
    """One connection with one request. `read` gets the body's pieces as they come."""

    def __init__(self, body: bytes, host: str, read: Callable[[bytes], None]) -> None:
        head = (
            f"POST /internal/v1/generate HTTP/1.1\r\nhost: {host}\r\nx-skerry-secret: {SECRET}\r\n"
            f"x-skerry-wire: {WIRE_VERSION}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._read = read
        self._parser = httptools.HttpResponseParser(self)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by inheritance
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._read(body)

    def on_message_complete(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(error or AskFailed("the connection was cut"))


async def stream(url: str, request: GenerateRequest, read: Callable[[bytes], None]) -> None:
    """Ask, and give `read` the answer's frames as they come. Raises OSError, AskFailed."""
    address = url.removeprefix("http://")
    loop = asyncio.get_running_loop()
    body = msgspec.msgpack.encode(request)
    _, one = await loop.create_connection(
        lambda: Stream(body, address, read), *split_address(address)
    )
    try:
        await one.over
    finally:
        one.close()


async def ask(url: str, request: GenerateRequest, told: Told | None = None) -> Told:
    """The whole answer, told in `told` while it comes. Raises AskFailed when it ends with a
    fault."""
    told = told or Told(time.monotonic())
    decoder = event_decoder()
    faults: list[Fault] = []

    def read(data: bytes) -> None:
        now = time.monotonic()
        for event in decoder.feed(data):
            match event:
                case Accepted() | Moved():
                    told.prefill, told.decode = event.prefill, event.decode
                    told.reason = event.reason
                case Delta():
                    told.times += [now] * len(event.token_ids)
                    told.token_ids += event.token_ids
                    told.text += event.text
                case Done():
                    told.done = event
                case Fault():
                    faults.append(event)

    await stream(url, request, read)
    if faults or told.done is None:
        raise AskFailed(str(faults[:1] or "no end"))
    return told
