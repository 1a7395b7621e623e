"""A request's tab: reserved before, settled after, whatever the end; its record written first."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from core.errors import (
    Cancelled,
    ContextLengthExceeded,
    IncompleteStream,
    InternalError,
    LimitsUnavailable,
    NoCapacity,
    QuotaExceeded,
    RateLimited,
    RequestError,
)
from core.events import Done
from core.types import Message, RequestId, Usage
from edge.tenants import lock
from edge.tenants.meter import Kind, limits_of
from tests.edge.tenants.fakes import NOW, Bench, MemoryShare, Pot, batch, bench, caller, request

DONE = Done(usage=Usage(prompt_tokens=5, completion_tokens=20, cached_tokens=4))
ACME = {"requests_per_minute": 10, "tokens_per_minute": 100}


def counts(one: Bench) -> dict[str, int]:
    """Used and reserved."""
    return {
        limit.kind.value: one.ledger.meter("acme", limit, NOW).taken
        for limit in limits_of(caller(**ACME).tenant)
    }


async def test_ten_at_once_on_a_budget_of_one(tmp_path: Path) -> None:
    """B27: parallel requests slip past the token budget."""
    async with bench(tmp_path) as one:
        gate = asyncio.Event()

        refused: list[RateLimited] = []

        async def ask(i: int) -> str:
            try:
                async with one.budgets.tab(caller(**ACME), request(f"r{i}"), "chat") as tab:
                    await gate.wait()
                    tab.see(batch())
                    tab.finish(DONE)
                    return "ok"
            except RateLimited as error:
                refused.append(error)
                return error.code

        asked = [asyncio.create_task(ask(i)) for i in range(10)]
        await asyncio.sleep(0)
        gate.set()
        said = await asyncio.gather(*asked)
        assert {(error.http_status, error.retry_after_s) for error in refused} == {(429, 65)}
        assert sorted(said) == ["ok"] + ["rate_limit_exceeded"] * 9
        assert counts(one) == {"requests": 1, "tokens": 25}
        assert await ask(10) == "ok"  # 25 used, 60 fit


async def test_a_whole_answer(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        async with one.budgets.tab(caller(**ACME), request(), "chat") as tab:
            assert dict(tab.headers())[b"x-ratelimit-remaining-tokens"] == b"40"
            assert dict(tab.headers())[b"x-ratelimit-reset-requests"] == b"65s"
            tab.see(batch())
            tab.finish(DONE)
            assert len(one.records()) == 1  # before whatever is sent next
        (record,) = one.records()
        assert (record.prompt, record.cached, record.completion) == (5, 4, 20)
        assert (record.complete, record.outcome, record.region) == (True, "ok", "eu")
        assert (record.tenant, record.key, record.model) == ("acme", "key1", "tiny")
        assert counts(one) == {"requests": 1, "tokens": 25}


@pytest.mark.parametrize(
    ("error", "delivered", "used", "outcome"),
    [
        (NoCapacity("full"), 0, (0, 0), "no_capacity"),
        (ContextLengthExceeded("long"), 0, (0, 0), "context_length_exceeded"),
        (RuntimeError("bug"), 0, (0, 0), "internal_error"),
        (Cancelled("left"), 0, (1, 5), "cancelled"),
        (asyncio.CancelledError(), 0, (1, 5), "cancelled"),
        (Cancelled("left"), 2, (1, 9), "cancelled"),
        (IncompleteStream("cut"), 1, (1, 7), "incomplete_stream"),
    ],
)
async def test_every_other_end(
    tmp_path: Path, error: BaseException, delivered: int, used: tuple[int, int], outcome: str
) -> None:
    async def work(one: Bench) -> None:
        async with one.budgets.tab(caller(**ACME), request(), "chat") as tab:
            for _ in range(delivered):
                tab.see(batch())
            raise error

    async with bench(tmp_path) as one:
        with pytest.raises(type(error)):
            await work(one)
        assert counts(one) == {"requests": used[0], "tokens": used[1]}
        (record,) = one.records()
        assert (record.complete, record.outcome) == (False, outcome)
        assert (record.prompt, record.completion) == (5 if delivered else 0, 2 * delivered)


async def test_the_regions_count_replaces_the_estimate(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        text = "word " * 20
        async with one.budgets.tab(caller(**ACME), request(text=text, answer=10), "chat") as tab:
            assert counts(one)["tokens"] != 31
            tab.see(batch(counted=21))
            assert counts(one)["tokens"] == 31
            tab.finish(Done(usage=Usage(prompt_tokens=21, completion_tokens=10)))
        assert counts(one)["tokens"] == 31
        assert one.budgets.bytes.of(request().model) != 4.0  # it learns


async def test_what_a_template_adds_is_reserved_once_it_was_seen(tmp_path: Path) -> None:
    """A limit of 100 that let 105 pass: the model's own system prompt was not in the estimate."""
    chat = replace(
        request(answer=50), prompt=None, messages=(Message(role="user", content="Say hello."),)
    )
    truth = Done(usage=Usage(prompt_tokens=33, completion_tokens=50))

    async def ask(one: Bench, name: str) -> int:
        asked = replace(chat, id=RequestId(name))
        async with one.budgets.tab(caller(tokens_per_minute=500), asked, "chat") as tab:
            reserved = 500 - int(dict(tab.headers())[b"x-ratelimit-remaining-tokens"])
            tab.see(batch(counted=33))
            tab.finish(truth)
        one.clock.now += 65
        return reserved

    async with bench(tmp_path) as one:
        assert await ask(one, "r1") < 83
        later = [await ask(one, f"r{i}") for i in range(2, 40)]
        assert 83 <= min(later) <= max(later) < 93
        raw = replace(request("raw", text="Say hello.", answer=50))  # no template, nothing added
        async with one.budgets.tab(caller(tokens_per_minute=500), raw, "text") as tab:
            assert int(dict(tab.headers())[b"x-ratelimit-remaining-tokens"]) > 440


async def test_choices_and_answers_without_a_limit(tmp_path: Path) -> None:
    async with bench(tmp_path) as one:
        async with one.budgets.tab(caller(**ACME), request(answer=20, n=3), "chat") as tab:
            assert counts(one)["tokens"] == 65
            tab.finish(DONE)
        async with one.budgets.tab(
            caller(tokens_per_minute=5000), request("r2", answer=None), "chat"
        ):
            assert counts(one)["tokens"] == 25 + 5 + 1024
        with pytest.raises(RateLimited):  # a whole window's: not while part of it is used
            await one.budgets.tab(caller(**ACME), request("r3", answer=None), "chat").__aenter__()


async def test_refusals_say_what_and_until_when(tmp_path: Path) -> None:
    async def refused(**limits: int) -> RequestError:
        with pytest.raises(RequestError) as caught:
            await one.budgets.tab(caller(**limits), request("x"), "chat").__aenter__()
        return caught.value

    async with (
        bench(tmp_path) as one,
        one.budgets.tab(
            caller(
                requests_per_minute=1, tokens_per_minute=70, tokens_per_day=70, concurrent_streams=1
            ),
            request(),
            "chat",
        ),
    ):
        day = await refused(tokens_per_day=70)
        assert type(day) is QuotaExceeded
        assert (day.cloudflare_code, day.http_status) == (3036, 429)
        assert day.retry_after_s == 12 * 3600 - 30
        assert "2026-12-01T00:00:00Z" in day.message
        for minute in (await refused(requests_per_minute=1), await refused(tokens_per_minute=70)):
            assert type(minute) is RateLimited
            assert minute.retry_after_s == 65
            assert "2026-11-30T12:01:35Z" in minute.message
        streams = await refused(concurrent_streams=1)
        assert type(streams) is RateLimited
        assert streams.retry_after_s == 1
        never = await refused(tokens_per_minute=59)
        assert type(never) is RateLimited
        assert never.retry_after_s is None  # waiting does not help
        assert {NoCapacity.cloudflare_code} & {day.cloudflare_code, never.cloudflare_code} == set()


async def test_a_tenant_without_limits_touches_no_ledger_but_is_written_down(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as one:
        one.ledger.close()
        async with one.budgets.tab(caller(), request(), "chat") as tab:
            assert tab.headers() == []
            tab.see(batch())
            tab.finish(DONE)
        assert len(one.records()) == 1


async def test_usage_that_cannot_be_written_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "usage").write_text("in the way")
    async with bench(tmp_path) as one:

        async def answer() -> None:
            async with one.budgets.tab(caller(**ACME), request(), "chat") as tab:
                tab.see(batch())
                tab.finish(DONE)

        with pytest.raises(InternalError):
            await answer()
        assert one.ledger.open_streams("acme", NOW) == 0


async def test_a_batch_is_measured_by_the_day_alone(tmp_path: Path) -> None:
    day = caller(tokens_per_minute=10, tokens_per_day=200, concurrent_streams=1)
    async with bench(tmp_path) as one:
        await one.budgets.charge_day(day, "b1", [request(), request(), request()])
        with pytest.raises(QuotaExceeded):
            await one.budgets.charge_day(day, "b2", [request()])
        await one.budgets.charge_day(caller(), "b3", [request()] * 9)
        used = {one_.kind: one.ledger.meter("acme", one_, NOW) for one_ in limits_of(day.tenant)}
        assert (used[Kind.DAY].taken, used[Kind.TOKENS].taken) == (180, 0)
        assert one.ledger.open_streams("acme", NOW) == 0


async def test_two_machines_share_a_limit_by_leases(tmp_path: Path) -> None:
    pot = Pot()
    admitted = 0
    async with (
        bench(tmp_path / "a", share=MemoryShare(pot, "a")) as one,
        bench(tmp_path / "b", share=MemoryShare(pot, "b")) as other,
    ):
        for i in range(60):
            where = (one, other)[i % 2]
            try:
                async with where.budgets.tab(
                    caller(tokens_per_minute=1000), request(f"r{i}", 10, 20), "chat"
                ) as tab:
                    tab.finish(Done(usage=Usage(prompt_tokens=10, completion_tokens=20)))
                    admitted += 1
            except RateLimited:
                continue
    assert admitted * 30 <= 1000
    assert admitted * 30 >= 1000 - 100 - 30  # one lease may lie idle on the other machine
    assert pot.asked < 45  # ahead, not one by one


async def test_leases_ahead_mean_that_few_requests_wait(tmp_path: Path) -> None:
    pot = Pot()
    async with bench(tmp_path, share=MemoryShare(pot)) as one:
        acme = caller(tokens_per_minute=10_000)
        one.clock.now = NOW + 4  # the step ends in 1 s
        async with one.budgets.tab(acme, request(), "chat"):
            asked = pot.asked
            one.pool.lease_ahead()
            while pot.asked == asked:
                await asyncio.sleep(0)
        (limit,) = limits_of(acme.tenant)
        assert one.ledger.granted("acme", limit, limit.window(NOW) + 1, one.clock.now) == 1000
        one.clock.now = NOW + 5
        pot.lost = True
        async with one.budgets.tab(acme, request("r2"), "chat"):
            pass  # served from what was leased


@pytest.mark.parametrize(
    ("when_lost", "then"), [("refuse", "are refused"), ("allow", "grants whole limits")]
)
async def test_the_log_says_once_that_redis_is_lost_and_once_that_it_is_back(
    tmp_path: Path,
    when_lost: Literal["refuse", "allow"],
    then: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "skerry.budget")
    pot = Pot(lease=0.06)
    acme = caller(tokens_per_minute=1000)
    async with bench(tmp_path, share=MemoryShare(pot), when_lost=when_lost) as one:

        async def ask(names: str) -> None:
            for name in names:
                with suppress(LimitsUnavailable):
                    async with one.budgets.tab(acme, request(name), "chat") as tab:
                        tab.finish(Done(usage=Usage(prompt_tokens=5, completion_tokens=55)))

        await ask("ab")
        assert not caplog.records
        pot.lost = True
        await ask("cdefg")
        (lost,) = caplog.records
        assert (lost.levelname, "lost" in lost.message) == ("WARNING", True)
        assert lost.message.endswith(then)
        pot.lost = False
        one.clock.now += 65
        await ask("hijk")
        assert [(line.levelname, line.message) for line in caplog.records[1:]] == [
            ("INFO", "shared limits are back")
        ]


@pytest.mark.parametrize("when_lost", ["refuse", "allow"])
async def test_redis_is_lost(tmp_path: Path, when_lost: Literal["refuse", "allow"]) -> None:
    """First what is leased is used up; then the topology's rule."""
    pot = Pot(lease=0.06)
    acme = caller(tokens_per_minute=1000)

    async def ask(one: Bench, name: str) -> None:
        async with one.budgets.tab(acme, request(name), "chat") as tab:
            tab.finish(Done(usage=Usage(prompt_tokens=5, completion_tokens=55)))

    async with bench(tmp_path, share=MemoryShare(pot), when_lost=when_lost) as one:
        await ask(one, "r0")
        while pot.asked < 2:
            await asyncio.sleep(0)  # the lease ahead
        pot.lost = True
        await ask(one, "r1")
        if when_lost == "refuse":
            with pytest.raises(LimitsUnavailable):
                await ask(one, "r2")
        else:
            for i in range(2, 16):
                await ask(one, f"r{i}")  # the whole limit, by this ledger's own count
            with pytest.raises(RateLimited):
                await ask(one, "r16")
        pot.lost = False
        if when_lost == "refuse":
            await ask(one, "r20")


async def test_a_settlement_that_fails_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds the counts for too long at the moment of an answer's end."""
    monkeypatch.setattr(lock, "LOCK_S", 0.01)
    async with bench(tmp_path) as one:
        async with one.budgets.tab(caller(**ACME), request(), "chat") as tab:
            tab.see(batch())
            stopped = lock.KernelLock(tmp_path / "budgets.counts")
            with stopped.held():
                tab.finish(DONE)
                await one.pool.tick()
            stopped.close()
        assert counts(one) == {"requests": 1, "tokens": 60}
        await one.pool.tick()
        assert counts(one) == {"requests": 1, "tokens": 25}
        assert one.ledger.open_streams("acme", NOW) == 0
