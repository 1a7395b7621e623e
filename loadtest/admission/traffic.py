"""Callers who ask, leave early, and see processes die under them."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
import msgspec
import psutil

from core.config_tenants import Tenant
from core.types import Usage
from edge.tenants.ledger import Ledger
from edge.tenants.meter import limits_of
from loadtest.admission.cast import TENANTS, TIGHT, Cast, Edge
from loadtest.edge.doubles import MODEL

PROMPT = list(range(16))  # what the double counts
ANSWER = 12
PAUSE_MS = 2
ABORTS = 0.008
"""Of all requests, left in the middle by their callers; kills make it about one in a hundred."""
KILL_EVERY = 1000
"""Requests between two kills of a worker process; two thirds in, a region is killed."""
AT_ONCE = 24
TIMEOUT_S = 30.0
BACK_OFF_S = 0.5
_USAGE = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Counts(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What the caller of one request knows. `status` 0: no answer came."""

    tenant: str
    status: int
    request_id: str = ""
    usage: Usage | None = None
    left: bool = False
    """The caller went away on purpose."""


class Window:
    """What all edges together count of the tight tenant in the last minute, and the most it was."""

    def __init__(self, ledgers: Sequence[Ledger], limit: int) -> None:
        self._ledgers = ledgers
        (self._limit,) = limits_of(Tenant(tokens_per_minute=limit))
        self.highest = 0

    def look(self) -> None:
        now = time.time()
        counted = (ledger.meter(TIGHT, self._limit, now).taken for ledger in self._ledgers)
        self.highest = max(self.highest, sum(counted))


@contextmanager
def window_of(cast: Cast, limit: int) -> Iterator[Window]:
    ledgers = [Ledger(edge.state / "budgets.counts") for edge in cast.edges]
    try:
        yield Window(ledgers, limit)
    finally:
        for ledger in ledgers:
            ledger.close()


async def run(cast: Cast, requests: int, window: Window, *, seed: int = 1) -> list[Seen]:
    """Ask `requests` times, `AT_ONCE` at a time."""
    draw = random.Random(seed)
    leaving = {i for i in range(requests) if draw.random() < ABORTS}
    order, kill_at = iter(range(requests)), min(requests, KILL_EVERY) // 2
    seen: list[Seen] = []
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:

        async def caller() -> None:
            for i in order:
                edge = cast.edges[i % len(cast.edges)]
                one = await _ask(session, cast, edge, i, leaves=i in leaving)
                seen.append(one)
                if not one.status:
                    await asyncio.sleep(BACK_OFF_S)  # as clients do; else one outage takes them all
                if i % KILL_EVERY == kill_at:
                    turn = cast.edges[i // KILL_EVERY % len(cast.edges)]  # the others come back
                    _kill(draw.choice(turn.workers()))
                if i == requests * 2 // 3:
                    _kill(psutil.Process(cast.regions[0].process.pid))

        async def watch() -> None:
            while True:
                window.look()
                await asyncio.sleep(0.5)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
        watching.cancel()
        window.look()
    return seen


async def _ask(
    session: aiohttp.ClientSession, cast: Cast, edge: Edge, number: int, *, leaves: bool
) -> Seen:
    tenant = TENANTS[number % len(TENANTS)]
    stream = leaves or number % 2 == 0
    body: dict[str, object] = {
        "model": MODEL, "prompt": PROMPT, "max_tokens": ANSWER, "seed": PAUSE_MS, "stream": stream
    }  # fmt: skip
    if stream:
        body["stream_options"] = {"include_usage": True}
    headers = {"authorization": f"Bearer {cast.keys[tenant]}"}
    status, request_id, text = 0, "", b""
    try:
        async with session.post(f"{edge.url}/v1/completions", json=body, headers=headers) as answer:
            status, request_id = answer.status, answer.headers.get("x-request-id", "")
            if leaves:
                await answer.content.readany()
                answer.close()
                return Seen(tenant, status, request_id, left=True)
            text = await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError):
        pass  # a process died: what was received before still counts
    return Seen(tenant, status, request_id, _usage(text) if status == 200 else None)


def _usage(text: bytes) -> Usage | None:
    """The usage in a whole answer, or in the last event that has one."""
    pieces = [line[6:] for line in text.split(b"\n") if line.startswith(b"data: {")] or [text]
    for piece in reversed(pieces):
        if b'"usage":{' in piece:
            counts = msgspec.json.decode(_USAGE.decode(piece)["usage"], type=_Counts)
            return Usage(
                prompt_tokens=counts.prompt_tokens, completion_tokens=counts.completion_tokens
            )
    return None


def _kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)
