"""Readers of streams on raw sockets, many in one process, that cost little for themselves.

Each keeps one connection and asks one request after the other. The text of a piece is the moment
the double sent it (see `doubles`), so that a piece's own way can be told from the others'.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from loadtest.edge.doubles import MODEL

_PIECE = re.compile(rb'"content":"(\d+)"')
_END = b"0\r\n\r\n"
HOST = "127.0.0.1"


class BrokenStream(Exception):
    """A stream did not bring what was asked for."""


@dataclass(slots=True)
class Seen:
    """One stream: microseconds. `pairs`: (sent, received) of each piece."""

    asked: int
    first: int = 0
    pairs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def first_ms(self) -> float:
        return (self.first - self.asked) / 1000

    def added_gaps_ms(self) -> list[float]:
        """How much farther apart, or nearer, two pieces came than they were sent."""
        return [
            abs((got - got_before) - (sent - sent_before)) / 1000
            for (sent_before, got_before), (sent, got) in zip(
                self.pairs, self.pairs[1:], strict=False
            )
        ]


class Client(asyncio.Protocol):
    """One connection to a gateway."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._seen = Seen(0)
        self._tail = b""
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by inheritance
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        now = micros()
        seen = self._seen
        if not seen.first and data.startswith(b"HTTP/1.1 ") and data[9:12] != b"200":
            self._fail(f"refused: {data[-300:].decode(errors='replace')}")
        if self._tail:
            data = self._tail + data
        end = 0
        for match in _PIECE.finditer(data):
            seen.pairs.append((int(match[1]), now))
            end = match.end()
        if not seen.first and seen.pairs:
            seen.first = now
        if self._ended is not None and data.endswith(_END):
            self._tail = b""
            if not self._ended.done():  # the reader may have been cancelled
                self._ended.set_result(None)
            self._ended = None
        else:
            self._tail = data[max(end, len(data) - 64) :]

    def connection_lost(self, error: Exception | None) -> None:
        self._fail("the connection was closed")

    async def stream(self, request: bytes, events: int) -> Seen:
        """One request; raises BrokenStream when not all its events came."""
        assert self._transport is not None, "asked once connected"
        self._seen, self._tail = Seen(micros()), b""
        self._ended = ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await ended
        if len(self._seen.pairs) != events:
            raise BrokenStream(f"{len(self._seen.pairs)} of {events} events came")
        return self._seen

    def _fail(self, why: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(BrokenStream(why))
        self._ended = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def micros() -> int:
    return time.monotonic_ns() // 1000


def request(port: int, events: int, pause_ms: int) -> bytes:
    body = msgspec.json.encode(
        {
            "model": MODEL,
            "stream": True,
            "max_tokens": events,
            "seed": pause_ms,
            "messages": [{"role": "user", "content": "How far is it to the next lighthouse?"}],
        }
    )
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: %b:%d\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (HOST.encode(), port, len(body), body)
    )


async def play(
    port: int, *, clients: int, streams: int, events: int, pause_ms: int, spread_s: float = 0.0
) -> list[Seen]:
    """`streams` by each of `clients`, which begin within `spread_s`. Raises BrokenStream."""
    asked = request(port, events, pause_ms)
    loop = asyncio.get_running_loop()

    async def one(number: int) -> Sequence[Seen]:
        await asyncio.sleep(spread_s * number / clients)
        _, client = await loop.create_connection(Client, HOST, port)
        try:
            return [await client.stream(asked, events) for _ in range(streams)]
        finally:
            client.close()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number)) for number in range(clients)]
    return [seen for task in tasks for seen in task.result()]
