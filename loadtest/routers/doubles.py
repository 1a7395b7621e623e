"""Backends that speak the OpenAI dialect: the simulator's regions, in time that runs faster."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from core.types import RegionName
from loadtest.routers.text import Prompt, read
from loadtest.simulator.site import ANSWER_TOKENS_PER_S, Site
from loadtest.simulator.traces import Request, chain_of

MODEL = "model"


class Clock:
    """Seconds of the trace since the clock was made; `speed` of them pass in a real one."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._began = time.monotonic()

    def now(self) -> float:
        return (time.monotonic() - self._began) * self._speed

    async def until(self, moment: float) -> None:
        left = (moment - self.now()) / self._speed
        if left > 0:
            await asyncio.sleep(left)


class _Body(msgspec.Struct):
    """Of POST /v1/completions, as far as it matters here."""

    prompt: str


@dataclass(frozen=True, slots=True)
class Served:
    """What a backend knows of one answer. `first_s`: when its first token was made."""

    site: int
    cached: int
    first_s: float


@dataclass(slots=True)
class Double:
    """One backend. `served` by the number of the request."""

    number: int
    site: Site
    clock: Clock
    served: dict[int, Served] = field(default_factory=dict)
    url: str = ""

    async def complete(self, http: web.Request) -> web.Response:
        body = msgspec.json.decode(await http.read(), type=_Body)
        asked, arrived = read(body.prompt), self.clock.now()
        blocks, tokens = tuple(asked.blocks), asked.tokens
        chain = chain_of(blocks, tokens)
        first_s, cached = self.site.take(
            Request(arrived, blocks, tokens, asked.answer_tokens, b"", chain), arrived
        )
        self.served[asked.number] = Served(self.number, cached, first_s)
        await self.clock.until(first_s + asked.answer_tokens / ANSWER_TOKENS_PER_S)
        return web.json_response(_answer(asked, cached))

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def well(self, _: web.Request) -> web.Response:
        return web.Response(text="OK")


def _answer(asked: Prompt, cached: int) -> dict[str, object]:
    return {
        "id": f"cmpl-{asked.number}",
        "object": "text_completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "text": "yes", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": asked.tokens,
            "completion_tokens": asked.answer_tokens,
            "total_tokens": asked.tokens + asked.answer_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }


@asynccontextmanager
async def doubles(
    count: int, *, blocks: int, tokens_per_s: float, clock: Clock
) -> AsyncIterator[list[Double]]:
    """`count` backends on free ports, closed at the end."""
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            name = RegionName(f"backend-{number}")
            site = Site(name, blocks=blocks, tokens_per_s=tokens_per_s, regions=count)
            found.append(Double(number, site, clock))
            await stack.enter_async_context(_serving(found[-1]))
        yield found


def _silent() -> logging.Logger:
    """Routers try other protocols on a backend first; the server would tell of each."""
    logger = logging.getLogger("loadtest.routers.doubles")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    return logger


@asynccontextmanager
async def _serving(double: Double) -> AsyncIterator[None]:
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/completions", double.complete)
    app.router.add_get("/v1/models", double.models)
    for path in ("/health", "/health_generate"):
        app.router.add_get(path, double.well)
    runner = web.AppRunner(app, access_log=None, logger=_silent())
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        double.url = f"http://127.0.0.1:{port}"
        yield
    finally:
        await runner.cleanup()
