"""The requests of a trace through one base URL, each at its time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from loadtest.routers.doubles import MODEL, Clock, Double
from loadtest.routers.text import Prompt
from loadtest.simulator.traces import Request, infinite_hit

DEADLINE_S = 120.0
"""For one answer, in real seconds."""
START_S = 3.0
"""Trace seconds before the first request."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What the backends saw and the callers got. `late_s`: of a hundred requests, 99 were sent no
    later than this after their time, in trace seconds; much of it makes the figures worthless."""

    sent: int
    answered: int
    hit: float
    hit_of_infinite: float
    busiest: float
    mean_ttft_s: float
    p99_ttft_s: float
    late_s: float


async def replay(
    requests: Sequence[Request], url: str, doubles: Sequence[Double], clock: Clock
) -> Tally:
    """Send all of them, the first at once; returns when the last is answered."""
    began_s = clock.now() + START_S - requests[0].at_s
    sent_at: list[float] = [0.0] * len(requests)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(number: int, request: Request) -> bool:
            answer = request.answer_tokens
            prompt = Prompt(number, request.tokens, answer, request.blocks)
            body = {"model": MODEL, "prompt": prompt.text(), "max_tokens": max(1, answer)}
            sent_at[number] = clock.now()
            try:
                async with session.post(f"{url}/v1/completions", json=body) as told:
                    await told.read()
                    return told.status == 200
            except (aiohttp.ClientError, TimeoutError):
                return False  # counted as not answered

        async with asyncio.TaskGroup() as group:
            tasks = []
            for number, request in enumerate(requests):
                await clock.until(began_s + request.at_s)
                tasks.append(group.create_task(one(number, request)))
    late = sorted(
        at - began_s - request.at_s for at, request in zip(sent_at, requests, strict=True)
    )
    late_s = late[int(0.99 * (len(late) - 1))]
    return _tally(requests, doubles, sent_at, sum(task.result() for task in tasks), late_s)


def _tally(
    requests: Sequence[Request],
    doubles: Sequence[Double],
    sent_at: Sequence[float],
    answered: int,
    late_s: float,
) -> Tally:
    served = {number: one for double in doubles for number, one in double.served.items()}
    if not answered or not served:
        return Tally(len(requests), answered, 0.0, 0.0, math.nan, math.nan, math.nan, late_s)
    times = sorted(one.first_s - sent_at[number] for number, one in served.items())
    tokens = sum(requests[number].tokens for number in served)
    hit = sum(one.cached for one in served.values()) / tokens
    return Tally(
        sent=len(requests),
        answered=answered,
        hit=hit,
        hit_of_infinite=hit / infinite_hit(requests),
        busiest=max(len(double.served) for double in doubles) * len(doubles) / len(served),
        mean_ttft_s=sum(times) / len(times),
        p99_ttft_s=times[int(0.99 * (len(times) - 1))],
        late_s=late_s,
    )
