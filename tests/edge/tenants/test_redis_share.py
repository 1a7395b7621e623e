"""Leases from a real Redis: grants never add up to more than the limit; its loss has a name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from core.errors import LimitsUnavailable
from edge.tenants import redis_share
from edge.tenants.meter import STEP_S, STEPS, Kind, Limit
from edge.tenants.redis_share import PAUSE_S, RedisShare, redis_client
from edge.tenants.share import Grant
from tests.edge.tenants.conftest import RedisServer

LIMIT = Limit(Kind.TOKENS, 1000, STEP_S, STEPS)
WINDOW = 359_208_000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def shares(
    url: str, *names: str, clock: Clock | None = None
) -> AsyncIterator[list[RedisShare]]:
    client = redis_client(url, password=None, timeout_s=2.0)
    try:
        yield [
            RedisShare(
                client, ledger=name, process=name, lease=0.1, timeout_s=2.0, clock=clock or Clock()
            )
            for name in names
        ]
    finally:
        await client.aclose()


async def test_grants_add_up_to_the_limit_and_no_further(redis_server: RedisServer) -> None:
    async with shares(redis_server.url, "a", "b", "c") as all_three:
        have = [0, 0, 0]
        for turn in range(60):
            i = turn % 3
            grant = await all_three[i].take(
                "acme", LIMIT, WINDOW, have=have[i], need=1 + turn, past={}
            )
            assert grant.granted >= have[i]
            have[i] = grant.granted
            assert sum(have) + grant.left == LIMIT.amount
        assert sum(have) > 900
        other = await all_three[0].take("other", LIMIT, WINDOW, have=0, need=5, past={})
        assert other == Grant(100, 900)  # a lease, since it is more than was needed


async def test_windows_that_count_together_share_the_limit(redis_server: RedisServer) -> None:
    """And what was leased of one and not used is free as soon as it is told."""
    async with shares(redis_server.url, "a", "b") as (one, other):
        assert await one.take("acme", LIMIT, WINDOW, have=0, need=700, past={}) == Grant(700, 300)
        later = WINDOW + STEPS - 1
        assert await other.take("acme", LIMIT, later, have=0, need=301, past={}) == Grant(0, 300)
        told = {WINDOW: 650}
        assert await one.take("acme", LIMIT, later, have=0, need=0, past=told) == Grant(0, 350)
        assert await other.take("acme", LIMIT, later, have=0, need=350, past={}) == Grant(350, 0)
        # A window to come counts too: what is leased of it ahead must fit when it begins.
        assert await one.take("acme", LIMIT, later + 1, have=0, need=600, past={}) == Grant(600, 50)
        assert await other.take("acme", LIMIT, later, have=350, need=1, past={}) == Grant(350, 0)


async def test_streams_are_held_by_processes_and_given_back(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shares(redis_server.url, "a", "b") as (one, other):
        assert await one.hold("acme", 10, have=0, need=1) == Grant(1, 9)
        assert await one.hold("acme", 10, have=1, need=8) == Grant(9, 1)
        assert await other.hold("acme", 10, have=0, need=2) == Grant(0, 1)
        assert await other.hold("acme", 10, have=0, need=1) == Grant(1, 0)
        assert await one.hold("acme", 10, have=4, need=0) == Grant(4, 5)
        assert await other.hold("acme", 10, have=1, need=5) == Grant(6, 0)
        monkeypatch.setattr(redis_share, "HOLD_S", 0.02)
        assert await other.hold("acme", 10, have=6, need=0) == Grant(6, 0)
        while (await one.hold("acme", 10, have=4, need=6)).granted < 10:
            await asyncio.sleep(0.005)  # the other died: its places are ours when its lease ends


async def test_nothing_rather_than_too_little(redis_server: RedisServer) -> None:
    async with shares(redis_server.url, "a", "b") as (one, other):
        assert await one.take("acme", LIMIT, WINDOW, have=0, need=950, past={}) == Grant(950, 50)
        assert await other.take("acme", LIMIT, WINDOW, have=0, need=51, past={}) == Grant(0, 50)
        assert await other.take("acme", LIMIT, WINDOW, have=0, need=50, past={}) == Grant(50, 0)


async def test_many_at_once(redis_server: RedisServer) -> None:
    """The script is one step: questions that cross do not grant the same part twice."""
    async with shares(redis_server.url, *(f"l{i}" for i in range(8))) as all_eight:
        grants = await asyncio.gather(
            *(
                share.take("acme", LIMIT, WINDOW, have=0, need=30, past={})
                for share in all_eight * 4
            )
        )
        best = [max(one.granted for one in grants[i::8]) for i in range(8)]
        assert sum(best) <= LIMIT.amount
        assert min(one.left for one in grants) == LIMIT.amount - sum(best)


async def test_a_redis_that_lost_its_memory_learns_it_from_those_who_ask(
    redis_server: RedisServer,
) -> None:
    clock = Clock()
    async with shares(redis_server.url, "a", "b", clock=clock) as (one, other):
        assert (await one.take("acme", LIMIT, WINDOW, have=0, need=600, past={})).granted == 600
        redis_server.kill()
        with pytest.raises(LimitsUnavailable):
            await other.take("acme", LIMIT, WINDOW, have=0, need=1, past={})
        redis_server.start()
        clock.now += 2 * PAUSE_S
        assert await one.take("acme", LIMIT, WINDOW, have=600, need=1, past={}) == Grant(700, 300)
        assert await other.take("acme", LIMIT, WINDOW, have=0, need=301, past={}) == Grant(0, 300)


async def test_a_dead_redis_is_left_alone_for_a_while(redis_server: RedisServer) -> None:
    clock = Clock()
    async with shares(redis_server.url, "a", clock=clock) as (one,):
        redis_server.kill()
        with pytest.raises(LimitsUnavailable) as refused:
            await one.take("acme", LIMIT, WINDOW, have=0, need=1, past={})
        assert refused.value.http_status == 503
        redis_server.start()
        with pytest.raises(LimitsUnavailable):
            await one.take("acme", LIMIT, WINDOW, have=0, need=1, past={})  # not asked again yet
        clock.now += PAUSE_S
        assert (await one.take("acme", LIMIT, WINDOW, have=0, need=1, past={})).granted == 100


async def test_a_question_that_is_broken_off_does_not_answer_the_next(
    redis_server: RedisServer,
) -> None:
    async with shares(redis_server.url, "a") as (one,):
        await one.take("warm", LIMIT, WINDOW, have=0, need=1, past={})
        for i in range(30):
            broken = asyncio.create_task(one.take("acme", LIMIT, WINDOW, have=0, need=1, past={}))
            for _ in range(i % 5):
                await asyncio.sleep(0)
            broken.cancel()
            await asyncio.wait({broken})
            other = await one.take(f"tenant-{i}", LIMIT, WINDOW, have=0, need=400 + i, past={})
            assert other == Grant(400 + i, 600 - i)
