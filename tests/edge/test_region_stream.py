"""The relay's own HTTP client on real sockets: warm connections, bounds, and other servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from core.errors import IncompleteStream, RegionUnavailable, RequestError
from edge.region_stream import HIGH_BYTES, LEAVE_BYTES, Streams

OK = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
REQUEST = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Counts connections; `serve` is called for each."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.connections = 0
        self.lost = asyncio.Event()
        self.address = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.lost.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[tuple[Server, Streams]]:
    one, streams = Server(serve), Streams()
    server = await asyncio.start_server(one, "127.0.0.1", 0)
    one.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield one, streams
    finally:
        await streams.close()
        server.close()
        await server.wait_closed()


def _nothing() -> RequestError | None:
    return None


async def _asked(reader: asyncio.StreamReader) -> None:
    await reader.readuntil(b"\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def test_a_connection_serves_one_request_after_the_other() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await _asked(reader)
            writer.write(OK + _chunk(b"a") + _chunk(b"b") + b"0\r\n\r\n")

    async with serving(serve) as (server, streams):
        for _ in range(3):
            stream, head = await streams.open(
                server.address, REQUEST, look=_nothing, deadline_s=9.0
            )
            data = b""
            while piece := await stream.read():
                data += piece
            stream.leave()
            assert (head.status, data, streams.idle) == (200, b"ab", 1)
        assert server.connections == 1


async def test_a_given_up_answer_that_ends_soon_leaves_its_connection_warm() -> None:
    """What a cancelled region sends is its end; the connection stays for the next request."""
    cancelled = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await _asked(reader)
            writer.write(OK + _chunk(b"a"))
            await cancelled.wait()
            writer.write(_chunk(b"rest") + b"0\r\n\r\n")

    async with serving(serve) as (server, streams):
        stream, _ = await streams.open(server.address, REQUEST, look=_nothing, deadline_s=9.0)
        assert await stream.read() == b"a"
        stream.leave()
        assert streams.idle == 0
        cancelled.set()
        async with asyncio.timeout(30):
            while not streams.idle:
                await asyncio.sleep(0.01)
        again, _ = await streams.open(server.address, REQUEST, look=_nothing, deadline_s=9.0)
        assert (await again.read()).startswith(b"a")  # nothing of the answer before
        again.leave()
        assert server.connections == 1


@pytest.mark.parametrize("flood", [False, True], ids=["silent", "flood"])
async def test_a_given_up_answer_that_goes_on_loses_its_connection(
    flood: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A flood is not borne for as long as silence.
    monkeypatch.setattr("edge.region_stream.LEAVE_S", 60.0 if flood else 0.3)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _asked(reader)
        writer.write(OK + _chunk(b"a"))
        while True:
            if flood:
                writer.write(_chunk(b"x" * LEAVE_BYTES))
                await writer.drain()
            else:
                await _asked(reader)

    async with serving(serve) as (server, streams):
        stream, _ = await streams.open(server.address, REQUEST, look=_nothing, deadline_s=9.0)
        await stream.read()
        stream.leave()
        async with asyncio.timeout(30):
            await server.lost.wait()
        assert streams.idle == 0


async def test_who_does_not_read_makes_the_sender_wait() -> None:
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await _asked(reader)
        writer.write(OK)
        while True:
            writer.write(_chunk(b"x" * 10_000))
            await writer.drain()
            sent += 10_000

    async with serving(serve) as (server, streams):
        stream, _ = await streams.open(server.address, REQUEST, look=_nothing, deadline_s=60.0)
        before = -1
        async with asyncio.timeout(30):
            while sent != before or not sent:  # until the kernel's buffers take no more
                before = sent
                await asyncio.sleep(0.3)
        held = await stream.read()
        assert len(held) < HIGH_BYTES + (1 << 20)
        assert sent > len(held)
        stood = sent
        async with asyncio.timeout(30):
            while sent < stood + 1_000_000:  # and goes on when it is read
                assert await stream.read()
        stream.leave()


async def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _asked(reader)
        writer.write(OK + b"0\r\n\r\n")
        await _asked(reader)  # the second question comes, and is not answered

    async with serving(serve) as (server, streams):
        first, _ = await streams.open(server.address, REQUEST, look=_nothing, deadline_s=9.0)
        assert await first.read() == b""
        first.leave()
        assert streams.idle == 1
        second, head = await streams.open(server.address, REQUEST, look=_nothing, deadline_s=9.0)
        assert (head.status, server.connections) == (200, 2)
        second.leave()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"", RegionUnavailable),
        (b"HELLO\r\n\r\n", RegionUnavailable),
        (OK + _chunk(b"a"), IncompleteStream),
        (OK + b"5\r\na", IncompleteStream),
    ],
    ids=["closes", "not-http", "cut-between", "cut-inside"],
)
async def test_what_is_no_answer_has_a_name(said: bytes, kind: type[RequestError]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _asked(reader)
        writer.write(said)

    async with serving(serve) as (server, streams):
        with pytest.raises(kind):
            await _read_all(streams, server.address)


async def _read_all(streams: Streams, address: str) -> None:
    stream, _ = await streams.open(address, REQUEST, look=_nothing, deadline_s=9.0)
    try:
        while await stream.read():
            pass
    finally:
        stream.leave()


async def test_a_quiet_answer_is_looked_at_and_its_deadline_kept() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _asked(reader)
        writer.write(OK)
        await _asked(reader)

    over = RegionUnavailable("time is over")
    async with serving(serve) as (server, streams):
        began = asyncio.get_running_loop().time()
        stream, _ = await streams.open(server.address, REQUEST, look=lambda: over, deadline_s=0.2)
        with pytest.raises(RegionUnavailable) as caught:
            await stream.read()
        stream.leave()
        assert caught.value is over
        assert 0.2 <= asyncio.get_running_loop().time() - began < 20.0
