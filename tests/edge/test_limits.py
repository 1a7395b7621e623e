"""What a caller may send: bytes as sent and as unpacked, depth, heads, and the time it takes.

Raw sockets, since a good client sends none of this. B11, B28.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil
import pytest
import uvicorn
from litestar.types import Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from core.errors import InvalidRequest
from edge.api.body import MAX_CONTAINERS, MAX_DEPTH, check_shape
from edge.api.upload import BODIES_AT_ONCE
from edge.listener import MAX_HEAD_BYTES, guarding
from edge.server import Server
from tests.edge.fakes import MODEL, FakeRegion, RunningEdge, running_edge, world_of

RUN = "/client/v4/accounts/acc/ai/run/@cf/acme/tiny"
TEXT = "/v1/completions"
LIMIT = 100_000
QUICK_S = 1.0
"""What heads and bodies may take in these tests."""
CROWD_S = 6.0
"""In it a crowd has sent its bodies, also to an edge that has to share a core."""


@asynccontextmanager
async def limited(
    tmp_path: Path, quick_s: float = QUICK_S
) -> AsyncIterator[tuple[RunningEdge, FakeRegion]]:
    limits = f"body_bytes = {LIMIT}\nbody_s = {quick_s}\nhead_s = {quick_s}"
    async with (
        FakeRegion("eu").serving() as eu,
        running_edge(world_of(tmp_path, eu, limits=limits)) as edge,
    ):
        yield edge, eu


class Wire:
    """A connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(30):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, body

    async def closed(self) -> None:
        """The other side closes; what it still says is thrown away."""
        async with asyncio.timeout(30):
            try:
                while await self.reader.read(1 << 16):
                    pass
            except ConnectionError:
                return


@asynccontextmanager
async def wire(url: str) -> AsyncIterator[Wire]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


def head(path: str, *more: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: x", *more, "", ""]).encode()


def body(path: str = RUN, said: str = "Hi") -> bytes:
    more = {} if path == RUN else {"model": MODEL}
    return json.dumps({"prompt": said, **more}).encode()


def code_of(path: str, answer: bytes) -> object:
    said = json.loads(answer)
    return said["errors"][0]["code"] if path == RUN else said["error"]["code"]


async def good(edge: RunningEdge) -> None:
    assert (await edge.http.post(RUN, content=body())).status_code == 200


@pytest.mark.parametrize(("path", "code"), [(RUN, 3006), (TEXT, "body_too_large")])
async def test_bytes_are_counted_as_they_come(tmp_path: Path, path: str, code: object) -> None:
    """Whatever the head promises: a length that is over, chunks without end, or a lie."""
    piece = b"2000\r\n" + b" " * 0x2000 + b"\r\n"
    async with limited(tmp_path) as (edge, eu):
        async with wire(edge.url) as line:
            await line.send(head(path, f"content-length: {LIMIT + 1}"))
            status, headers, answer = await line.answer()
            assert (status, code_of(path, answer), headers["connection"]) == (413, code, "close")
        async with wire(edge.url) as line:
            await line.send(head(path, "transfer-encoding: chunked"), *[piece] * 13)
            status, _, answer = await line.answer()
            assert (status, code_of(path, answer)) == (413, code)
        exact = body(path).ljust(LIMIT)
        assert (await edge.http.post(path, content=exact)).status_code == 200
        assert (await edge.http.post(path, content=exact + b" ")).status_code == 413
        assert len(eu.requests) == 1


async def test_gzip_is_unpacked_under_the_same_limit(tmp_path: Path) -> None:
    async with limited(tmp_path) as (edge, eu):
        packed = {"content-encoding": "gzip"}
        for good_one in (
            gzip.compress(body(said="zipped")),
            gzip.compress(body(said="zipped")[:9]) + gzip.compress(body(said="zipped")[9:]),
            gzip.compress(body(said="zipped").ljust(LIMIT)),
        ):
            answer = await edge.http.post(RUN, content=good_one, headers=packed)
            assert answer.status_code == 200, answer.text
            assert eu.requests[-1].messages[0].content == "zipped"
        for bad, status, code in (
            (gzip.compress(body().ljust(LIMIT + 1)), 413, 3006),
            (gzip.compress(body())[:-9], 400, 8001),
            (body(), 400, 8001),
            (gzip.compress(body()) + b"rest", 400, 8001),
            (zlib.compress(body()), 400, 8001),
            (gzip.compress(b"") * (LIMIT // 20), 400, 3003),
            (b"", 400, 3003),
        ):
            answer = await edge.http.post(RUN, content=bad, headers=packed)
            assert (answer.status_code, code_of(RUN, answer.content)) == (status, code)
        async with wire(edge.url) as line:  # members without end, and nothing in them
            await line.send(head(RUN, "content-encoding: gzip", "transfer-encoding: chunked"))
            piece = gzip.compress(b"") * 400
            await line.send(*[b"%x\r\n%s\r\n" % (len(piece), piece)] * 13)
            assert (await line.answer())[0] == 413
        for name in ("br", "deflate", "gzip, gzip", "zstd"):
            answer = await edge.http.post(RUN, content=body(), headers={"content-encoding": name})
            assert answer.status_code == 415
            assert name in answer.json()["errors"][0]["message"]
        plain = {"content-encoding": "identity"}
        assert (await edge.http.post(RUN, content=body(), headers=plain)).status_code == 200


async def test_a_gzip_bomb_takes_neither_memory_nor_time(tmp_path: Path) -> None:
    """A gigabyte of blanks in a megabyte, and one that is small itself."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    bomb = packer.compress(b" " * (64 << 20)) + packer.flush()
    assert len(bomb) < LIMIT
    async with limited(tmp_path) as (edge, _):
        before, began = psutil.Process().memory_info().rss, time.process_time()
        for _ in range(20):
            answer = await edge.http.post(RUN, content=bomb, headers={"content-encoding": "gzip"})
            assert (answer.status_code, code_of(RUN, answer.content)) == (413, 3006)
        assert time.process_time() - began < 5
        assert psutil.Process().memory_info().rss - before < 32 << 20
        await good(edge)


def _fits(shape: bytes) -> bool:
    try:
        check_shape(shape)
    except InvalidRequest:
        return False
    return True


def test_depth_is_exact_and_strings_do_not_count() -> None:
    for opener, inner, closer in ((b"[", b"", b"]"), (b'{"a":', b"1", b"}")):
        for deep in (1, MAX_DEPTH, MAX_DEPTH + 1, 5000):
            assert _fits(opener * deep + inner + closer * deep) is (deep <= MAX_DEPTH)
    assert _fits(b"[" + b",".join([b"[]"] * 5000) + b"]")
    text = json.dumps({"a": '[{"\\' * 5000, "b": [[]]}).encode()
    assert text.count(b"[") > MAX_DEPTH
    assert _fits(text)
    assert not _fits(b"[" * 5000)  # cut before its end


def test_lists_and_objects_are_counted() -> None:
    assert _fits(b"[" + b",".join([b"{}"] * (MAX_CONTAINERS - 1)) + b"]")
    assert not _fits(b"[" + b",".join([b"{}"] * MAX_CONTAINERS) + b"]")
    assert _fits(json.dumps(["{}[]" * MAX_CONTAINERS]).encode())


async def test_depth_is_bounded_for_both_faces(tmp_path: Path) -> None:
    async with limited(tmp_path) as (edge, _):
        for path in (RUN, TEXT, "/v1/chat/completions"):
            for deep in (MAX_DEPTH, 10_000):
                nested = b'{"a":' * deep + b"1" + b"}" * deep
                sent = body(path)[:-1] + b', "metadata": ' + nested + b"}"
                answer = await edge.http.post(path, content=sent)
                assert answer.status_code == 400, (path, deep, answer.text)
                assert "deep" in answer.text
                await good(edge)


@pytest.mark.parametrize(
    "path", [RUN, RUN + "?queueRequest=true", TEXT], ids=["run", "queue", "completions"]
)
async def test_a_body_that_dribbles_is_cut(tmp_path: Path, path: str) -> None:
    async with limited(tmp_path) as (edge, eu), wire(edge.url) as line:
        began = time.monotonic()
        await line.send(head(path, "content-length: 50"), b"{")
        status, headers, answer = await line.answer()
        assert status == 408
        assert headers["connection"] == "close"
        assert code_of(RUN if "run" in path else path, answer) in (3007, "request_timeout")
        assert QUICK_S * 0.9 < time.monotonic() - began < QUICK_S + 20
        assert edge.admission.in_flight == 0
        assert eu.requests == []
        await good(edge)


async def test_all_bodies_together_are_bounded(tmp_path: Path) -> None:
    """Many callers who send almost a whole body and then wait hold no more than so much."""
    async with limited(tmp_path, CROWD_S) as (edge, _), AsyncExitStack() as stack:
        most = b"{" + b" " * (LIMIT - 2)
        lines = [await stack.enter_async_context(wire(edge.url)) for _ in range(2 * BODIES_AT_ONCE)]
        for line in lines:
            await line.send(head(RUN, f"content-length: {LIMIT}"), most)
        statuses = Counter([(await line.answer())[0] for line in lines])
        assert statuses[408] <= BODIES_AT_ONCE
        assert statuses[408] + statuses[429] == len(lines)
        assert statuses[429] >= BODIES_AT_ONCE
        await good(edge)


async def _dribble(line: Wire, pieces: Iterable[bytes], pause_s: float) -> None:
    for piece in pieces:
        await line.send(piece)
        await asyncio.sleep(pause_s)


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    """An app that reads all of a body and says how much there was."""
    seen, more = 0, True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        seen, more = seen + len(message["body"]), message["more_body"]
    said = str(seen).encode()
    headers = [(b"content-length", str(len(said)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said, "more_body": False})


@asynccontextmanager
async def guarded(protocol: type[asyncio.Protocol], head_s: float) -> AsyncIterator[str]:
    guard = guarding(head_s=head_s, protocol=protocol)
    server = Server(uvicorn.Config(_echo, http=guard, port=0, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(30):
        while not server.started:
            await asyncio.sleep(0)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


both = pytest.mark.parametrize("protocol", [AutoHTTPProtocol, H11Protocol], ids=["auto", "h11"])


@both
async def test_heads_that_do_not_come_are_cut(protocol: type[asyncio.Protocol]) -> None:
    """Slow ones get a 408, connections that say nothing are closed, both within their time."""
    async with guarded(protocol, QUICK_S) as url:
        async with wire(url) as slow, wire(url) as silent:
            began = time.monotonic()
            dribbling = asyncio.create_task(
                _dribble(slow, [b"POST / HTTP/1.1\r\nx: ", *[b"y"] * 60], 0.05)
            )
            status, headers, answer = await slow.answer()
            assert (status, headers["connection"]) == (408, "close")
            assert json.loads(answer)["error"]["code"] == "request_timeout"
            await silent.closed()
            assert QUICK_S * 0.9 < time.monotonic() - began < QUICK_S + 20
            dribbling.cancel()
        async with wire(url) as kept:  # the second head of a connection is no better
            await kept.send(head("/", "content-length: 2"), b"ab")
            assert (await kept.answer())[0] == 200
            await kept.send(b"POST / HTTP/1.1\r\nhost: x\r\n")
            assert (await kept.answer())[0] == 408


@both
async def test_heads_are_bounded(protocol: type[asyncio.Protocol]) -> None:
    async with guarded(protocol, 30.0) as url:
        for padding, want in ((MAX_HEAD_BYTES - 200, 200), (MAX_HEAD_BYTES + 200, 431)):
            for lines in (1, 40):
                fields = [f"x-{i}: {'y' * (padding // lines - 10)}" for i in range(lines)]
                async with wire(url) as line:
                    await line.send(head("/", *fields, "content-length: 1"), b"z")
                    status, _, answer = await line.answer()
                    assert status == want, (padding, lines, answer)
        async with wire(url) as line:  # no end of it, in small pieces
            await line.send(b"POST / HTTP/1.1\r\nhost: x\r\n")
            await line.send(*[b"x-%d: y\r\n" % number for number in range(8000)])
            assert (await line.answer())[0] == 431
            await line.closed()


@both
async def test_what_is_in_order_passes(protocol: type[asyncio.Protocol]) -> None:
    """Many requests on one connection, heads in pieces, and a body beyond any head's limit."""
    async with guarded(protocol, 5.0) as url, wire(url) as line:
        for number in range(50):
            asked = head("/", "content-length: 3") + b"abc"
            cut = number % len(asked)
            await line.send(asked[:cut], asked[cut:])
            assert (await line.answer())[2] == b"3"
        large = 5 * MAX_HEAD_BYTES
        await line.send(head("/", f"content-length: {large}"), *[b"x" * MAX_HEAD_BYTES] * 5)
        assert (await line.answer())[2] == str(large).encode()
        chunked = head("/", "transfer-encoding: chunked")
        await line.send(chunked, b"1\r\n", b"a\r\n0\r\n\r\n")
        assert (await line.answer())[2] == b"1"
        await line.send(*[head("/", "content-length: 1") + b"a"] * 5)  # pipelined
        for _ in range(5):
            assert (await line.answer())[2] == b"1"


async def test_too_many_messages_are_refused(tmp_path: Path) -> None:
    limits = "body_bytes = 4000000"
    async with (
        FakeRegion("eu").serving() as eu,
        running_edge(world_of(tmp_path, eu, limits=limits)) as edge,
    ):
        one = b'{"role":"user","content":""}'
        for count, status in ((MAX_CONTAINERS - 2, 200), (MAX_CONTAINERS - 1, 400)):
            sent = b'{"messages":[' + b",".join([one] * count) + b"]}"
            answer = await edge.http.post(RUN, content=sent)
            assert answer.status_code == status, answer.text
            assert (str(MAX_CONTAINERS) in answer.text) is (status == 400)
        assert len(eu.requests[-1].messages) == MAX_CONTAINERS - 2
