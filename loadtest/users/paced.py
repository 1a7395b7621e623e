"""`python -m loadtest.users.paced`: a server that streams at a steady pace and computes nothing, to
measure the load generator itself. Says its address and serves until its input ends."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

from aiohttp import web

EVENTS, PACE_S = 30, 0.1
_EVENT = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
_USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":20,"completion_tokens":30}}\n\n'


async def _answer(request: web.Request) -> web.StreamResponse:
    await request.read()
    response = web.StreamResponse()
    response.enable_chunked_encoding()
    await response.prepare(request)
    loop = asyncio.get_running_loop()
    due = loop.time()
    with suppress(ConnectionResetError):  # the test is over
        for _ in range(EVENTS):
            await response.write(_EVENT)
            due += PACE_S
            await asyncio.sleep(due - loop.time())
        await response.write(_USAGE + b"data: [DONE]\n\n")
    return response


async def _serve() -> None:
    app = web.Application()
    app.router.add_post("/{rest:.*}", _answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    sys.stdout.write(f"http://127.0.0.1:{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_serve())
