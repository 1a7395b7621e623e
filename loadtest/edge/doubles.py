"""Servers that stand behind a gateway: `python -m loadtest.edge.doubles region|openai --port N`.

Both answer a request for `max_tokens` pieces with as many events; `seed` is the pause between two
of them in milliseconds, 0 for all in one write. The text of a piece is the moment of its sending,
in microseconds of the machine's monotonic clock, which every process of the machine shares. They
write prepared bytes and parse nothing but what they need: what is measured is not them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

import httptools
import msgspec

from core.events import Accepted, Delta, Done, Finish, encode_frame
from core.status import ModelStatus, NodeStatus, RegionStatus
from core.types import FinishReason, GenerateRequest, ModelName, NodeName, RegionName, Role, Usage

MODEL = "double"
STATUS_S = 0.5
_FRAMES_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/x-skerry-frames\r\nx-skerry-wire: 1\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"


class Wanted(msgspec.Struct):
    """What both dialects' requests say alike."""

    events: int
    pause_s: float


class Double(asyncio.Protocol):
    """One connection."""

    head: bytes

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._loop = asyncio.get_running_loop()
        self._path = ""
        self._body = b""
        self._timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None

    @abstractmethod
    def wanted(self, body: bytes) -> Wanted: ...

    @abstractmethod
    def first(self, wanted: Wanted) -> bytes:
        """What precedes the first piece."""

    @abstractmethod
    def piece(self, text: str) -> bytes: ...

    @abstractmethod
    def last(self, wanted: Wanted) -> bytes: ...

    @abstractmethod
    def page(self, path: str) -> bytes | None:
        """Another page's JSON; None when it was written already."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none by inheritance
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url.decode(), b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._path in ("/v1/chat/completions", "/internal/v1/generate"):
            self._generate(self.wanted(self._body))
            return
        page = self.page(self._path)
        if page is not None:
            self.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(page), page)
            )

    def write(self, data: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def later(self, seconds: float, call: object, *arguments: object) -> None:
        assert callable(call), "what is to be called"
        self._timer = self._loop.call_later(seconds, call, *arguments)

    def _generate(self, wanted: Wanted) -> None:
        if wanted.pause_s:
            self.write(self.head + chunk(self.first(wanted)))
            self._paced(wanted, wanted.events, self._loop.time())
            return
        pieces = [self.head, chunk(self.first(wanted))]
        pieces += [chunk(self.piece(now())) for _ in range(wanted.events)]
        self.write(b"".join([*pieces, chunk(self.last(wanted)), _END]))

    def _paced(self, wanted: Wanted, left: int, due: float) -> None:
        data = chunk(self.piece(now()))
        if left == 1:
            self.write(data + chunk(self.last(wanted)) + _END)
            return
        self.write(data)
        due += wanted.pause_s
        self.later(max(0.0, due - self._loop.time()), self._paced, wanted, left - 1, due)


class Region(Double):
    """A region: frames, its status stream, cancels."""

    head = _FRAMES_HEAD
    _started = time.monotonic_ns()

    def __init__(self, name: str = "double") -> None:
        super().__init__()
        self._name = RegionName(name)

    def wanted(self, body: bytes) -> Wanted:
        request = msgspec.msgpack.decode(body, type=GenerateRequest)
        return Wanted(request.sampling.max_tokens or 64, request.seed / 1000)

    def first(self, wanted: Wanted) -> bytes:
        return encode_frame(Accepted(prefill=None, decode=NodeName("double-1"), prompt_tokens=16))

    def piece(self, text: str) -> bytes:
        return encode_frame(Delta(token_ids=(7,), text=text))

    def last(self, wanted: Wanted) -> bytes:
        usage = Usage(prompt_tokens=16, completion_tokens=wanted.events)
        return encode_frame(Finish(reason=FinishReason.STOP)) + encode_frame(Done(usage=usage))

    def page(self, path: str) -> bytes | None:
        if path == "/internal/v1/status":
            self.write(_FRAMES_HEAD)
            self._status(1)
            return None
        return b"{}"

    def _status(self, sequence: int) -> None:
        model, node = ModelName(MODEL), NodeName("double-1")
        status = RegionStatus(
            region=self._name,
            epoch=str(self._started),
            sequence=sequence,
            models=(ModelStatus(name=model, context=8192, prefill_tokens_per_s=1000.0),),
            nodes=(NodeStatus(name=node, role=Role.COMBINED, model=model),),
        )
        self.write(chunk(encode_frame(status)))
        self.later(STATUS_S, self._status, sequence + 1)


class OpenAI(Double):
    """An engine as vLLM's router expects one: chat completions, models, health."""

    head = _SSE_HEAD

    class _Body(msgspec.Struct):
        max_tokens: int = 64
        seed: int = 0

    def wanted(self, body: bytes) -> Wanted:
        asked = msgspec.json.decode(body, type=self._Body)
        return Wanted(asked.max_tokens, asked.seed / 1000)

    def first(self, wanted: Wanted) -> bytes:
        return _sse(b'"role":"assistant","content":""', b"null")

    def piece(self, text: str) -> bytes:
        return _sse(b'"content":"%b"' % text.encode(), b"null")

    def last(self, wanted: Wanted) -> bytes:
        return _sse(b"", b'"stop"') + b"data: [DONE]\n\n"

    def page(self, path: str) -> bytes | None:
        return b'{"object":"list","data":[{"id":"double","object":"model","owned_by":"us"}]}'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def now() -> str:
    return str(time.monotonic_ns() // 1000)


def _sse(delta: bytes, reason: bytes) -> bytes:
    return (
        b'data: {"id":"chatcmpl-double","object":"chat.completion.chunk","created":1,'
        b'"model":"double","choices":[{"index":0,"delta":{%b},"logprobs":null,'
        b'"finish_reason":%b}]}\n\n' % (delta, reason)
    )


async def serve(kind: Callable[[], Double], port: int) -> None:
    server = await asyncio.get_running_loop().create_server(kind, "127.0.0.1", port, backlog=2048)
    sys.stdout.write(msgspec.json.encode({"port": server.sockets[0].getsockname()[1]}).decode())
    sys.stdout.write("\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> int:
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m loadtest.edge.doubles", description=__doc__)
    parser.add_argument("kind", choices=("region", "openai"))
    parser.add_argument("--port", type=int, default=0, help="printed as one line of JSON")
    parser.add_argument("--name", default="double", help="of a region")
    options = parser.parse_args(arguments)
    kinds: dict[str, Callable[[], Double]] = {
        "region": lambda: Region(options.name),
        "openai": OpenAI,
    }
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(kinds[options.kind], options.port))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
