"""Streams over several machines: never more than the tenant's, and idle places go back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from core.errors import LimitsUnavailable, RateLimited
from edge.tenants.budget import Tab
from edge.tenants.redis_share import RedisShare, redis_client
from edge.tenants.streams import StreamLeases
from tests.edge.tenants.conftest import RedisServer
from tests.edge.tenants.fakes import Bench, MemoryShare, Pot, bench, caller, request


@asynccontextmanager
async def processes(pot: Pot, number: int) -> AsyncIterator[list[StreamLeases]]:
    async with asyncio.TaskGroup() as tasks:
        yield [StreamLeases(MemoryShare(pot, f"p{i}"), tasks) for i in range(number)]


async def test_all_processes_together_open_as_many_as_there_are(
    redis_server: RedisServer,
) -> None:
    """At once, through a real Redis, with leases of more than one place."""
    client = redis_client(redis_server.url, password=None, timeout_s=2.0)
    async with asyncio.TaskGroup() as tasks:
        three = [
            StreamLeases(
                RedisShare(client, ledger="l", process=f"p{i}", lease=0.1, timeout_s=2.0), tasks
            )
            for i in range(3)
        ]
        most = open_ = 0

        async def stream(number: int) -> bool:
            nonlocal most, open_
            mine = three[number % 3]
            if not await mine.enter("acme", 20):
                return False
            open_ += 1
            most = max(most, open_)
            for _ in range(number % 7):
                await asyncio.sleep(0)
            open_ -= 1
            mine.leave("acme")
            return True

        entered = await asyncio.gather(*(stream(i) for i in range(300)))
        assert 0 < most <= 20
        assert sum(entered) >= 20
    await client.aclose()


async def test_the_last_place_is_found_wherever_it_is(tmp_path: Path) -> None:
    pot = Pot(lease=0.5)
    async with processes(pot, 2) as (one, other):
        for _ in range(6):
            assert await one.enter("acme", 8)
        assert [await other.enter("acme", 8) for _ in range(3)] == [True, True, False]
        one.leave("acme")
        assert not await other.enter("acme", 8)  # it is kept for a moment where it fell idle
        assert await one.enter("acme", 8)
        one.leave("acme")
        await one.tend()
        await one.tend()  # idle at two looks: given back
        assert await other.enter("acme", 8)
        assert not await one.enter("acme", 8)


async def test_who_is_quiet_holds_nothing(tmp_path: Path) -> None:
    pot = Pot(lease=0.5)
    async with processes(pot, 1) as (one,):
        assert await one.enter("acme", 8)
        one.leave("acme")
        asked = pot.asked
        for _ in range(4):
            await one.tend()
        assert pot.streams["acme"] == {"p0": 0}
        assert pot.asked == asked + 1  # once given back, it says no more


async def _tab(one: Bench, name: str) -> Tab:
    return await one.budgets.tab(caller(concurrent_streams=3), request(name), "chat").__aenter__()


async def test_tabs_of_two_edges_share_streams(tmp_path: Path) -> None:
    pot = Pot()
    async with (
        bench(tmp_path / "a", share=MemoryShare(pot, "a")) as one,
        bench(tmp_path / "b", share=MemoryShare(pot, "b")) as other,
    ):
        held = [await _tab(one, "r1"), await _tab(other, "r2"), await _tab(one, "r3")]
        for where in (one, other):
            with pytest.raises(RateLimited):
                await _tab(where, "r4")
        await held[0].__aexit__(None, None, None)
        held[0] = await _tab(one, "r5")
        for tab in held:
            await tab.__aexit__(None, None, None)
        assert [one.ledger.open_streams("acme", one.clock()) for one in (one, other)] == [0, 0]


async def test_a_refusal_for_another_reason_gives_the_place_back(tmp_path: Path) -> None:
    pot = Pot()
    both = caller(concurrent_streams=1, tokens_per_minute=60)
    async with bench(tmp_path, share=MemoryShare(pot)) as one:
        async with one.budgets.tab(both, request("r1"), "chat"):
            with pytest.raises(RateLimited, match="in flight"):
                await one.budgets.tab(both, request("r2"), "chat").__aenter__()
        with pytest.raises(RateLimited, match="tokens a minute"):
            await one.budgets.tab(both, request("r3", 50, 20), "chat").__aenter__()
        async with one.budgets.tab(both, request("r4", 1, 1), "chat"):
            pass


@pytest.mark.parametrize("when_lost", ["refuse", "allow"])
async def test_redis_is_lost(tmp_path: Path, when_lost: Literal["refuse", "allow"]) -> None:
    """Held places go on serving; then the topology's rule, `allow` by this machine's count."""
    pot = Pot()
    async with bench(tmp_path, share=MemoryShare(pot), when_lost=when_lost) as one:
        tabs = [await _tab(one, "r1")]
        pot.lost = True
        await tabs[0].__aexit__(None, None, None)
        tabs = [await _tab(one, "r2")]
        if when_lost == "refuse":
            with pytest.raises(LimitsUnavailable):
                await _tab(one, "r3")
        else:
            tabs += [await _tab(one, "r3"), await _tab(one, "r4")]
            with pytest.raises(RateLimited):
                await _tab(one, "r5")
        await one.pool.tick()  # what fails now is tried again
        pot.lost = False
        for tab in tabs:
            await tab.__aexit__(None, None, None)
        await one.pool.tick()
        await one.pool.tick()
        assert pot.streams["acme"] == {"me": 0}
