"""A server that answers as the script of its path says, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

USAGE = {
    "prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}
}  # fmt: skip


def _event(told: object) -> bytes:
    return b"data: " + json.dumps(told, separators=(",", ":")).encode() + b"\n\n"


def chunk(text: str) -> bytes:
    return _event({"choices": [{"delta": {"content": text}}]})


def usage() -> bytes:
    return _event({"choices": [], "usage": USAGE})


DONE = b"data: [DONE]\n\n"
GAP_S = 0.02
SCRIPTS: dict[str, list[bytes]] = {
    "/v1/chat/completions": [chunk(""), chunk("a"), chunk("b"), chunk("c"), usage(), DONE],
    "/v1/completions": [b'data: {"choices":[{"text":"x"}]}\n\n', usage(), DONE],
    "/cut": [chunk("a")],
    "/error": [chunk("a"), b'data: {"error":{"message":"gone","code":"region_unavailable"}}\n\n'],
    "/quiet": [b": waiting\n\n", usage(), DONE],
    "/held": [b":\n\n", b":\n\n", chunk("a"), b": skerry {}\n\n", b":\n\n", usage(), DONE],
    "/w/chat/": [b'data: {"response":"x"}\n\n', usage(), DONE],
}


async def _answer(request: web.Request) -> web.StreamResponse:
    await request.read()
    if request.path == "/busy":
        told = {"error": {"message": "full", "code": "rate_limit_exceeded"}}
        return web.json_response(told, status=429)
    response = web.StreamResponse(headers={"x-skerry-region": "eu"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    for piece in SCRIPTS[request.path]:
        await response.write(piece)
        await asyncio.sleep(GAP_S)
    if request.path == "/cut":
        assert request.transport is not None, "it is connected"
        request.transport.abort()
    return response


@contextmanager
def server() -> Iterator[str]:
    """Its address, until the block ends."""
    loop, started, ending = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    address: list[str] = []

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/{rest:.*}", _answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()
        await ending.wait()
        await runner.cleanup()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(30)
