"""Keys, limits and usage as callers meet them: a real edge, real sockets, both dialects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from core.config import World
from core.events import Done, Finish
from core.keys import Revoked, append_new, new_key
from core.types import FinishReason, GenerateRequest, Usage
from core.usage import UsageReader, UsageRecord
from edge.tenants import ledger, lock
from tests.edge.fakes import (
    SECRET,
    USAGE,
    Cut,
    FakeRegion,
    Hold,
    Step,
    chat,
    delta,
    fault,
    running_edge,
    world_of,
)

ACCESS = """
anonymous = "never"
[tenants.acme]
[tenants.other]
models = ["tiny"]
[tenants.small]
tokens_per_minute = 100
[tenants.daily]
tokens_per_day = 70
[tenants.picky]
models = ["second"]
[models.second]
source = "second.gguf"
"""
RUN = "/client/v4/accounts/local/ai/run/tiny"


def key_of(world: World, tenant: str) -> str:
    key, record = new_key(tenant, now=int(time.time()))
    append_new(world.state / "keys.jsonl", [record])
    return key


def auth(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def records(world: World) -> dict[str, UsageRecord]:
    return {one.id: one for one in UsageReader().read(world.state / "usage")}


async def eventually(check: Callable[[], Awaitable[bool]], within_s: float) -> float:
    """Seconds until `check` held."""
    began = time.monotonic()
    async with asyncio.timeout(within_s):
        while not await check():
            await asyncio.sleep(0.02)
    return time.monotonic() - began


async def test_401_403_and_who_is_asking(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu:
        world = world_of(tmp_path, eu, access=ACCESS)
        acme, picky = key_of(world, "acme"), key_of(world, "picky")
        async with running_edge(world) as edge:
            for bad in (
                {},
                auth("wrong"),
                {"authorization": "Bearer"},
                {"authorization": "Basic x"},
            ):
                said = await edge.http.post("/v1/chat/completions", json=chat(), headers=bad)
                assert said.status_code == 401
                assert said.json()["error"]["code"] == "invalid_api_key"
                said = await edge.http.post(RUN, json={"prompt": "hi"}, headers=bad)
                assert (said.status_code, said.json()["success"]) == (401, False)
                assert said.json()["errors"][0]["code"] == 10000
                assert (await edge.http.get("/v1/models", headers=bad)).status_code == 401
            assert eu.requests == []
            good = await edge.http.post("/v1/chat/completions", json=chat(), headers=auth(acme))
            assert good.status_code == 200
            assert eu.requests[0].namespace == "acme"
            refused = await edge.http.post("/v1/chat/completions", json=chat(), headers=auth(picky))
            assert refused.status_code == 403
            assert refused.json()["error"]["param"] == "model"
            listed = (await edge.http.get("/v1/models", headers=auth(picky))).json()["data"]
            assert [one["id"] for one in listed] == ["second"]
            hidden = await edge.http.get("/v1/models/tiny", headers=auth(picky))
            assert hidden.status_code == 404


async def test_a_stranger_with_a_large_body_is_told_so(tmp_path: Path) -> None:
    """The answer must survive what the caller still sends."""
    async with (
        FakeRegion("eu").serving() as eu,
        running_edge(world_of(tmp_path, eu, access=ACCESS)) as edge,
    ):
        body = chat("x" * 4_000_000)
        said = await edge.http.post("/v1/chat/completions", json=body, headers=auth("wrong"))
        assert said.status_code == 401


async def test_a_revocation_is_seen_within_five_seconds_here_and_by_followers(
    tmp_path: Path,
) -> None:
    async with FakeRegion("eu").serving() as eu:
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
        world = world_of(tmp_path / "a", eu, access=ACCESS)
        acme = key_of(world, "acme")
        async with running_edge(world) as edge:
            source = f'"never"\nkeys_from = "{edge.url.removeprefix("http://")}"'
            far = world_of(tmp_path / "b", eu, access=ACCESS.replace('"never"', source))
            async with running_edge(far, "there") as follower:
                ask = ("/v1/chat/completions",)
                for one in (edge, follower):
                    said = await one.http.post(*ask, json=chat(), headers=auth(acme))
                    assert said.status_code == 200
                append_new(world.state / "keys.jsonl", [Revoked(id=acme[10:22], at=1)])

                def refuses(one: httpx.AsyncClient) -> Callable[[], Awaitable[bool]]:
                    async def check() -> bool:
                        said = await one.post(*ask, json=chat(), headers=auth(acme))
                        return said.status_code == 401

                    return check

                await asyncio.gather(
                    eventually(refuses(edge.http), 5), eventually(refuses(follower.http), 5)
                )
                page = "/internal/v1/keys"
                assert (await edge.http.get(page)).status_code == 403
                listed = await edge.http.get(page, headers={"x-skerry-secret": SECRET})
                assert acme not in listed.text
                assert acme[10:22] in listed.text


async def test_a_follower_of_an_edge_that_lost_its_keys_is_shut_too(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu:
        for folder in ("a", "b"):
            (tmp_path / folder).mkdir()
        until = ACCESS.replace('"never"', '"until-keys"')
        world = world_of(tmp_path / "a", eu, access=until)
        key_of(world, "acme")
        (world.state / "keys.jsonl").unlink()
        async with running_edge(world) as edge:
            source = f'"until-keys"\nkeys_from = "{edge.url.removeprefix("http://")}"'
            far = world_of(tmp_path / "b", eu, access=ACCESS.replace('"never"', source))
            async with running_edge(far, "there") as follower:
                for one in (edge, follower):
                    said = await one.http.post("/v1/chat/completions", json=chat())
                    assert said.status_code == 401


async def test_parallel_requests_share_one_budget(tmp_path: Path) -> None:
    """B27, in both dialects: one of ten passes; the others are told how long to wait."""
    gate = asyncio.Event()

    def script(_: GenerateRequest) -> list[Step]:
        usage = Usage(prompt_tokens=5, completion_tokens=1)
        return [Hold(gate), delta("x"), (Finish(reason=FinishReason.LENGTH), Done(usage=usage))]

    async with FakeRegion("eu", script).serving() as eu:
        world = world_of(tmp_path, eu, access=ACCESS)
        small = key_of(world, "small")
        async with running_edge(world) as edge:
            await _early_in_a_minute()
            body = {"model": "tiny", "prompt": [1, 2, 3, 4, 5], "max_tokens": 55}
            asked = [
                asyncio.create_task(
                    edge.http.post("/v1/completions", json=body, headers=auth(small))
                )
                for _ in range(10)
            ]
            refused = 0
            for first in asyncio.as_completed(asked):
                refused += (await first).status_code == 429
                if refused == 9:
                    gate.set()
            said_all = [await one for one in asked]
            assert sorted(one.status_code for one in said_all) == [200] + [429] * 9
            for one in said_all:
                assert one.headers["x-ratelimit-limit-tokens"] == "100"
                if one.status_code == 429:
                    assert one.json()["error"]["code"] == "rate_limit_exceeded"
                    assert 1 <= int(one.headers["retry-after"]) <= 65
            assert len(eu.requests) == 1
            told = (await edge.http.get("/explain?newest=20")).json()["stories"]
            assert {(one["tenant"], one["key"]) for one in told} == {("small", small[10:22])}
            assert [one["outcome"] for one in told].count("rate_limit_exceeded") == 9
            # 6 were used in the end: 94 are left
            run = {"prompt": "hi", "max_tokens": 95}
            over = await edge.http.post(RUN, json=run, headers=auth(small))
            assert (over.status_code, over.json()["errors"][0]["code"]) == (429, 971)


async def _early_in_a_minute() -> None:
    """The counts of this test must not fall into two minutes."""
    while time.time() % 60 > 55:
        await asyncio.sleep(0.5)


async def test_the_days_quota_is_no_lack_of_capacity(tmp_path: Path) -> None:
    async with FakeRegion("eu", lambda _: [fault("no_capacity", retry_after_s=3)]).serving() as eu:
        world = world_of(tmp_path, eu, access=ACCESS, limits="hold = 0")
        daily, acme = key_of(world, "daily"), key_of(world, "acme")
        async with running_edge(world) as edge:
            run = {"prompt": "hi", "max_tokens": 80}
            over = await edge.http.post(RUN, json=run, headers=auth(daily))
            full = await edge.http.post(RUN, json=run, headers=auth(acme))
            assert (over.status_code, over.json()["errors"][0]["code"]) == (429, 3036)
            assert (full.status_code, full.json()["errors"][0]["code"]) == (429, 3040)
            body = {"model": "tiny", "prompt": [1] * 10, "max_tokens": 30}
            eu.script = lambda _: [delta("x"), (Finish(reason=FinishReason.STOP), Done(usage=Usage(
                prompt_tokens=10, completion_tokens=30)))]  # fmt: skip
            first = await edge.http.post("/v1/completions", json=body, headers=auth(daily))
            assert first.headers["x-ratelimit-remaining-tokens-day"] == "30"
            later = await edge.http.post("/v1/completions", json=body, headers=auth(daily))
            error = later.json()["error"]
            assert (later.status_code, error["code"]) == (429, "quota_exceeded")
            assert int(later.headers["retry-after"]) <= 86_400
            assert "T00:00:00Z" in error["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_usage_that_was_sent_is_usage_that_is_written(tmp_path: Path, stream: bool) -> None:
    async with FakeRegion("eu").serving() as eu:
        world = world_of(tmp_path, eu, access=ACCESS)
        other = key_of(world, "other")
        async with running_edge(world) as edge:
            body = chat(stream=stream)
            if stream:
                body["stream_options"] = {"include_usage": True}
            said = await edge.http.post("/v1/chat/completions", json=body, headers=auth(other))
            assert f'"prompt_tokens":{USAGE.prompt_tokens}' in said.text
            (record,) = records(world).values()
            assert record.id == said.headers["x-request-id"]
            assert record.usage == USAGE
            assert (record.tenant, record.edge, record.region) == ("other", "here", "eu")
            assert record.key == other[10:22]
            assert record.complete


async def test_requests_that_break_off(tmp_path: Path) -> None:
    """Cut by the region after text, left by the caller, refused: each is written down once."""
    gate = asyncio.Event()
    async with FakeRegion("eu", lambda _: [delta("a"), delta("b"), Cut()]).serving() as eu:
        world = world_of(tmp_path, eu, access=ACCESS)
        acme = key_of(world, "acme")
        async with running_edge(world) as edge:
            body, path = chat(stream=True), "/v1/chat/completions"
            cut = await edge.http.post(path, json=body, headers=auth(acme))
            assert "[DONE]" not in cut.text
            eu.script = lambda _: [delta("a"), Hold(gate)]
            async with edge.http.stream("POST", path, json=body, headers=auth(acme)) as left:
                await anext(left.aiter_lines())

            async def both() -> bool:
                return len(records(world)) == 2

            await eventually(both, 5)
            found = records(world)
            one = found[cut.headers["x-request-id"]]
            assert (one.outcome, one.completion, one.complete) == ("incomplete_stream", 2, False)
            one = found[left.headers["x-request-id"]]
            assert (one.outcome, one.completion, one.prompt) == ("cancelled", 1, 12)
            gate.set()


async def test_a_request_that_moves_to_another_region_is_one_record(tmp_path: Path) -> None:
    async with (
        FakeRegion("eu", lambda _: [Cut()]).serving() as eu,
        FakeRegion("us").serving() as us,
    ):
        world = world_of(tmp_path, eu, us, access=ACCESS)
        acme = key_of(world, "acme")
        async with running_edge(world) as edge:
            said = await edge.http.post("/v1/chat/completions", json=chat(), headers=auth(acme))
            assert said.status_code == 200
            assert len(eu.requests) == 1
            (record,) = records(world).values()
            assert (record.region, record.usage) == ("us", USAGE)
            assert msgspec.json.decode(said.content)["usage"]["completion_tokens"] == 3


async def test_a_ledger_that_is_held_is_503_for_those_with_limits_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edge starts at a moment when another process, which was stopped, holds the counts."""
    monkeypatch.setattr(lock, "LOCK_S", 0.01)
    monkeypatch.setattr(ledger, "AGAIN_S", 0.0)
    async with FakeRegion("eu").serving() as eu:
        world = world_of(tmp_path, eu, access=ACCESS)
        small, acme = key_of(world, "small"), key_of(world, "acme")
        stopped = lock.KernelLock(tmp_path / "budgets.counts")
        assert stopped.tried()
        async with running_edge(world) as edge:

            async def ask(key: str) -> httpx.Response:
                body = chat(max_tokens=5)
                return await edge.http.post("/v1/chat/completions", json=body, headers=auth(key))

            refused = await ask(small)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "limits_unavailable"
            assert (await ask(acme)).status_code == 200
            stopped.close()
            assert (await ask(small)).status_code == 200
