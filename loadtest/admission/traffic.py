"""Callers who ask, leave early, and see processes die under them."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field

import aiohttp
import msgspec
import psutil

from core.types import Usage
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


@dataclass
class Window:
    """Most that was counted in each window of the tight tenant, by edge."""

    most: defaultdict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))

    def look(self, edges: list[Edge]) -> None:
        for number, edge in enumerate(edges):
            for window, count in _counted(edge):
                before = self.most[window].get(number, 0)
                self.most[window][number] = max(before, count)

    def highest(self) -> int:
        """Tokens in the fullest window, all edges together."""
        return max((sum(by_edge.values()) for by_edge in self.most.values()), default=0)


async def run(cast: Cast, requests: int, *, seed: int = 1) -> tuple[list[Seen], Window]:
    """Ask `requests` times, `AT_ONCE` at a time."""
    draw = random.Random(seed)
    leaving = {i for i in range(requests) if draw.random() < ABORTS}
    order, kill_at = iter(range(requests)), min(requests, KILL_EVERY) // 2
    seen: list[Seen] = []
    window = Window()
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
                window.look(cast.edges)
                await asyncio.sleep(0.5)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
        watching.cancel()
        window.look(cast.edges)
    return seen, window


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


def _counted(edge: Edge) -> list[tuple[int, int]]:
    """(window, tokens used and reserved) of the tight tenant."""
    path = edge.state / "budgets.sqlite"
    if not path.exists():
        return []
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
        return ledger.execute(
            "select win, used + reserved from meters where tenant = ? and kind = 'tokens'", (TIGHT,)
        ).fetchall()
