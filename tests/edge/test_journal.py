"""What an edge remembers of its requests, and who may ask."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from core.story import StoryPage
from core.types import RequestId
from edge.journal import Journal, Recent
from edge.workers.table import Entry, digest_token, table_path, write_table
from tests.edge.fakes import (
    END,
    SECRET,
    USAGE,
    FakeRegion,
    Hold,
    RunningEdge,
    chat,
    delta,
    fault,
    running_edge,
    world_of,
)

SECRET_WORD = "xylophone"
LONG = f"the {SECRET_WORD} stands beside the lighthouse. " * 40


async def _explained(edge: RunningEdge, path: str = "", **headers: str) -> StoryPage:
    answer = await edge.http.get("/explain" + path, headers=headers)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=StoryPage)


async def test_a_request_is_told_with_its_reasons_and_without_its_text(tmp_path: Path) -> None:
    eu = FakeRegion("eu", script=lambda _: [fault("node_lost")])
    us = FakeRegion("us", script=lambda _: [delta(f"the {SECRET_WORD}"), *END])
    async with eu.serving(), us.serving(), running_edge(world_of(tmp_path, eu, us)) as edge:
        while True:  # until the prompt's home is the one that fails
            answer = await edge.http.post(
                "/v1/chat/completions", json=chat(LONG + str(len(us.requests)))
            )
            if answer.headers["x-skerry-route"] == "failover":
                break
        raw = (await edge.http.get("/explain/" + answer.headers["x-request-id"])).text
        by_answer_id = await _explained(edge, "/" + answer.json()["id"])
    assert SECRET_WORD not in raw
    [story] = msgspec.json.decode(raw, type=StoryPage).stories
    assert [one.id for one in by_answer_id.stories] == [story.id]
    assert (story.outcome, story.model, story.dialect) == ("ok", "tiny", "chat")
    assert [(one.region, one.outcome) for one in story.tries] == [
        ("eu", "node_lost"),
        ("us", "ok"),
    ]
    assert story.tries[1].reason == "failover"
    [choice] = story.choices
    assert choice.order == ("eu", "us")
    assert [one.region for one in choice.weighed if one.standing == "taken"] == ["eu"]
    assert choice.key_blocks > choice.key_depth == 2
    assert story.cached_tokens == USAGE.cached_tokens
    assert story.timings is not None
    assert story.timings.prefill_s == 0.02
    won = story.tries[1]
    assert won.accepted_s is not None
    assert won.first_s is not None
    assert story.ended_s is not None
    assert won.began_s <= won.accepted_s <= won.first_s <= story.ended_s


async def test_the_worker_that_asked_is_told(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu:
        world = world_of(tmp_path, eu)
        edges = [replace(one, admin="127.0.0.1:0") for one in world.topology.edges]
        world = dataclasses.replace(world, topology=replace(world.topology, edges=edges))
        mine = Entry(
            name="hello", tenant="anonymous", version="1", socket="s", used="u",
            token=digest_token(b"word"), answer_s=1.0, concurrency=1,
        )  # fmt: skip
        write_table(table_path(world.state, "here"), [mine])
        async with running_edge(world) as edge:
            for headers in ({"x-skerry-worker": "word"}, {}):
                answer = await edge.http.post("/v1/chat/completions", json=chat(), headers=headers)
                assert answer.status_code == 200
            stories = (await _explained(edge)).stories
    assert [one.by for one in stories] == ["", "hello"], "the newest comes first"


async def test_a_request_that_runs_is_told_too(tmp_path: Path) -> None:
    gate = asyncio.Event()
    eu = FakeRegion("eu", script=lambda _: [Hold(gate), delta("a"), *END])
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge:
        caller = asyncio.create_task(edge.http.post("/v1/chat/completions", json=chat()))
        async with asyncio.timeout(30):
            while not (stories := (await _explained(edge)).stories) or not stories[0].tries:
                await asyncio.sleep(0.01)
        assert (stories[0].outcome, stories[0].ended_s) == ("", None)
        gate.set()
        await caller
        assert (await _explained(edge)).stories[0].outcome == "ok"


async def test_an_unknown_id_says_how_far_back_one_can_look(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        unknown = await edge.http.get("/explain/no-such-request")
        nonsense = await edge.http.get("/explain/%22%3Cb%3E")
        odd = await edge.http.get("/explain?newest=all")
    assert unknown.status_code == 404
    assert "last 1000 requests, for 15 minutes" in unknown.json()["error"]["message"]
    assert nonsense.status_code == odd.status_code == 400


@pytest.mark.parametrize("name", ["x-forwarded-for", "forwarded", "x-real-ip"])
async def test_what_a_proxy_passes_on_needs_the_secret(tmp_path: Path, name: str) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        outside = {name: "203.0.113.7"}
        assert (await edge.http.get("/explain", headers=outside)).status_code == 403
        wrong = outside | {"x-skerry-secret": SECRET + "x"}
        assert (await edge.http.get("/explain/a", headers=wrong)).status_code == 403
        await _explained(edge, "", **outside, **{"x-skerry-secret": SECRET})
        for page in ("metrics", "worker", "stories"):
            inside = f"/internal/v1/{page}"
            assert (await edge.http.get(inside)).status_code == 403
            answer = await edge.http.get(inside, headers={"x-skerry-secret": SECRET})
            assert answer.status_code == 200


async def test_server_timing_says_where_the_time_went(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        answer: httpx.Response = await edge.http.post("/v1/chat/completions", json=chat())
    spans = dict(one.split(";dur=") for one in answer.headers["server-timing"].split(", "))
    assert list(spans) == ["admit", "first", "queue", "prefill", "decode", "transfer", "total"]
    assert float(spans["prefill"]) == 20.0
    assert float(spans["admit"]) <= float(spans["first"]) <= float(spans["total"])


def test_the_ring_is_bounded_in_number_and_in_age() -> None:
    now = 0.0
    recent = Recent("ams", 1, requests=3, seconds=60.0)
    for number in range(5):
        recent.open(Journal(RequestId(f"r{number}"), "chat", clock=lambda: now))
    assert [one.id for one in recent.newest(9)] == ["r4", "r3", "r2"]
    assert recent.find("r1") is None
    now = 61.0
    recent.open(Journal(RequestId("late"), "chat", clock=lambda: now))
    assert [one.id for one in recent.newest(9)] == ["late"]
