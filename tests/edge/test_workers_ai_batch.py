"""Batches from the edge's side: what is refused, where they go, how they come back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from aiohttp import web

from core.batches import KEEP_S, QUEUE_PRIORITY
from core.events import Delta, Event, Fault, Finish
from core.types import FinishReason, ModelName, RegionName, ResponseFormat
from core.usage import UsageRecord
from edge.queue_client import idlest
from edge.routing.view import RegionView
from regional.queue.http import QueueHttp
from regional.queue.kept import KeptQueue
from regional.queue.rules import Answered
from regional.queue.store import Store
from tests.edge.fakes import END, SECRET, FakeRegion, RunningEdge, running_edge, status_of, world_of
from tests.edge.workers_ai_face import RUN, USAGE_OUT, refused

QUEUE = f"{RUN}?queueRequest=true"
SAID: tuple[Event, ...] = (Delta(text="yes"), *END)


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class QueueRegion:
    """A fake region whose queue is a real one, worked off by hand."""

    name: str
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.kept = KeptQueue(Store(None), self.clock)
        http = QueueHttp(self.kept, check=self._check, poke=lambda: None, body_bytes=1 << 20)
        self.fake = FakeRegion(self.name, more=http.routes())

    def _check(self, http: web.Request) -> None:
        if http.headers.get("x-skerry-secret") != SECRET:
            raise web.HTTPForbidden

    async def answer(self, *answers: tuple[Event, ...]) -> None:
        """Work the queue off, with these answers in turn; the last one for all the rest."""
        jobs = await self.kept.claim(1000)
        for number, job in enumerate(jobs):
            await self.kept.end(job, Answered(answers[min(number, len(answers) - 1)]))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[QueueRegion]:
        async with self.fake.serving():
            yield self
        await self.kept.close()


@asynccontextmanager
async def here(tmp_path: Path) -> AsyncIterator[tuple[RunningEdge, QueueRegion]]:
    async with (
        QueueRegion("eu").serving() as eu,
        running_edge(world_of(tmp_path, eu.fake)) as edge,
    ):
        yield edge, eu


async def submit(edge: RunningEdge, *requests: dict[str, object], path: str = QUEUE) -> str:
    answer = await edge.http.post(path, json={"requests": list(requests)})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["success"], body["result"]["status"]) == (True, "queued")
    return str(body["result"]["request_id"])


async def poll(edge: RunningEdge, name: str, path: str = QUEUE) -> httpx.Response:
    return await edge.http.post(path, json={"request_id": name})


async def result(edge: RunningEdge, name: str) -> Any:
    answer = await poll(edge, name)
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]


def ledger(tmp_path: Path) -> list[UsageRecord]:
    lines = [line for file in tmp_path.rglob("*.jsonl") for line in file.read_bytes().splitlines()]
    records = [
        msgspec.json.decode(line, type=UsageRecord) for line in lines if b'"dialect"' in line
    ]
    return [one for one in records if one.dialect == "batch"]


async def test_from_submission_to_answers(tmp_path: Path) -> None:
    async with here(tmp_path) as (edge, eu):
        name = await submit(
            edge,
            {"prompt": "a", "external_reference": "first", "max_tokens": 5},
            {"messages": [{"role": "user", "content": "b"}], "temperature": 0},
        )
        waiting = {"status": "queued", "request_id": name, "model": "@cf/acme/tiny"}
        assert await result(edge, name) == waiting
        [one, two] = await eu.kept.claim(9)
        assert await result(edge, name) == {**waiting, "status": "running"}
        assert one.request.priority == QUEUE_PRIORITY
        assert (one.request.sampling.max_tokens, one.request.sampling.temperature) == (5, 0.6)
        assert two.request.sampling.temperature == 0
        await eu.kept.end(two, Answered(SAID))
        failed = Fault(code="context_length_exceeded", message="9 tokens", param="prompt")
        await eu.kept.end(one, Answered((failed,)))
        whole = await result(edge, name)
        assert whole["responses"] == [
            {
                "id": 0,
                "result": None,
                "success": False,
                "errors": [{"code": 5021, "message": "prompt: 9 tokens"}],
                "external_reference": "first",
            },
            {
                "id": 1,
                "result": {"response": "yes", "finish_reason": "stop", "usage": USAGE_OUT},
                "success": True,
                "errors": [],
                "external_reference": None,
            },
        ]
        assert whole["usage"] == USAGE_OUT
        assert await result(edge, name) == whole  # and again
        records = ledger(tmp_path)
        assert [(one.outcome, one.prompt, one.completion) for one in records] == [
            ("context_length_exceeded", 0, 0),
            ("ok", 12, 3),
        ]
        assert len({one.id for one in records}) == 2
        eu.clock.now += KEEP_S + 1
        await eu.kept.sweep()
        assert refused(await poll(edge, name), 404, 7003, "no such batch")


async def test_a_batch_that_no_region_takes_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    async with QueueRegion("eu").serving() as eu:
        world = world_of(tmp_path, eu.fake, more="[tenants.anonymous]\ntokens_per_day = 100")
    async with running_edge(world, fresh=0) as edge:
        for _ in range(5):
            answer = await edge.http.post(QUEUE, json={"prompt": "x", "max_tokens": 80})
            assert refused(answer, 429, 3040)  # never 3036: the day has all of its tokens


async def test_one_request_is_a_batch_too(tmp_path: Path) -> None:
    async with here(tmp_path) as (edge, eu):
        answer = await edge.http.post(QUEUE, json={"prompt": "x", "external_reference": "r"})
        name = answer.json()["result"]["request_id"]
        await eu.answer(SAID)
        [one] = (await result(edge, name))["responses"]
        assert (one["id"], one["external_reference"], one["success"]) == (0, "r", True)


async def test_json_mode_and_tools_in_a_batch(tmp_path: Path) -> None:
    async with here(tmp_path) as (edge, eu):
        form = {"response_format": {"type": "json_object"}}
        name = await submit(edge, {"prompt": "a", **form}, {"prompt": "b", **form})
        jobs = await eu.kept.claim(9)
        assert jobs[0].request.response_format == ResponseFormat()
        await eu.kept.end(jobs[0], Answered((Delta(text='{"a": [1]}'), *END)))
        cut = Finish(reason=FinishReason.LENGTH)
        await eu.kept.end(jobs[1], Answered((Delta(text='{"a": ['), cut, END[1])))
        good, bad = (await result(edge, name))["responses"]
        assert good["result"]["response"] == {"a": [1]}
        assert (bad["success"], bad["errors"][0]["code"]) == (False, 5024)


async def test_refused_as_a_whole_with_the_number_of_the_request(tmp_path: Path) -> None:
    bad: list[tuple[dict[str, object], int, str]] = [
        ({"requests": []}, 8001, "requests"),
        ({"requests": [{"prompt": "x"}] * 1001}, 8001, "requests"),
        ({"requests": [{"prompt": "x"}, {"prompt": "x", "top_k": 51}]}, 8001, "requests[1]"),
        ({"requests": [{"prompt": "x"}, {}]}, 3003, "requests[1]"),
        ({"requests": [{"prompt": "x"}, {"prompt": "x", "lora": "m"}]}, 5005, "requests[1]"),
        ({"requests": [{"prompt": "x", "stream": True}]}, 8001, "requests[0].stream"),
        (
            {"requests": [{"prompt": "x", "options": {"rejectIfBusy": True}}]},
            8001,
            "requests[0].options",
        ),
        ({"requests": [{"prompt": "x"}], "prompt": "y"}, 8001, "prompt"),
        ({}, 3003, "prompt"),
        ({"request_id": 5}, 8001, "request_id"),
        ({"request_id": "x", "prompt": "y"}, 8001, "prompt"),
    ]
    async with here(tmp_path) as (edge, eu):
        for body, code, word in bad:
            answer = await edge.http.post(QUEUE, json=body)
            assert refused(answer, 405 if code == 5005 else 400, code, word)
        for raw in (b"", b"[]", b"{", b'{"requests": 1}'):
            answer = await edge.http.post(QUEUE, content=raw)
            assert refused(answer, 400, 8001 if raw else 3003)
        assert await eu.kept.claim(9) == []
        unknown = QUEUE.replace("tiny", "none")
        answer = await edge.http.post(unknown, json={"requests": [{"prompt": "x"}]})
        assert refused(answer, 400, 5007)


async def test_nobody_reads_what_is_not_theirs(tmp_path: Path) -> None:
    """Every id that this edge did not sign for this caller and model is no batch at all."""
    async with here(tmp_path) as (edge, eu):
        name = await submit(edge, {"prompt": "x"})
        await eu.answer(SAID)
        for other in (
            name.replace("eu", "us"), name[:-1], name + "0", name.upper(), "", "x" * 5000,
            name[:5] + ("0" if name[5] != "0" else "1") + name[6:],
        ):  # fmt: skip
            assert refused(await poll(edge, other), 404, 7003, "no such batch")
        elsewhere = QUEUE.replace("@cf/acme/tiny", "nobody")
        assert refused(await poll(edge, name, elsewhere), 404, 7003, "no such batch")
        assert (
            await poll(edge, name, QUEUE.replace("@cf/acme/tiny", "default"))
        ).status_code == 200


async def test_the_next_region_takes_what_the_first_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eu, us = QueueRegion("eu"), QueueRegion("us")
    async with (
        eu.serving(),
        us.serving(),
        running_edge(world_of(tmp_path, eu.fake, us.fake)) as edge,
    ):
        monkeypatch.setattr("regional.queue.store.MAX_ITEMS", 2)
        regions = [(await submit(edge, {"prompt": "x"})).split(".")[0] for _ in range(4)]
        assert sorted(regions) == ["eu", "eu", "us", "us"]
        full = await edge.http.post(QUEUE, json={"requests": [{"prompt": "x"}]})
        assert refused(full, 429, 3040, "Capacity temporarily exceeded")
        assert full.headers["retry-after"] == "60"


async def test_a_region_that_is_gone_is_named_not_guessed(tmp_path: Path) -> None:
    async with QueueRegion("eu").serving() as eu:
        world = world_of(tmp_path, eu.fake)
        async with running_edge(world) as edge:
            name = await submit(edge, {"prompt": "x"})
    async with running_edge(world, fresh=0) as edge:  # another process of the same fleet
        assert refused(await poll(edge, name), 429, 3040, "eu")
        answer = await edge.http.post(QUEUE, json={"requests": [{"prompt": "x"}]})
        assert refused(answer, 429, 3040)


async def test_a_body_over_the_limit(tmp_path: Path) -> None:
    async with here(tmp_path) as (edge, _):
        large = json.dumps({"requests": [{"prompt": "x" * 100}] * 100_000}).encode()
        assert refused(await edge.http.post(QUEUE, content=large), 413, 3006)


def test_the_idlest_region_that_may() -> None:
    tiny = ModelName("tiny")

    def view(name: str, *, work_s: float = 0.0, **more: Any) -> RegionView:
        status = msgspec.structs.replace(status_of(name), decode_work_s=work_s)
        if more.pop("draining", False):
            status = msgspec.structs.replace(status, draining=True)
        given = {"fresh": True, "round_trip_s": 0.01, **more}
        return RegionView(
            name=RegionName(name), configured=frozenset({tiny}), status=status, **given
        )

    world = [
        view("busy", work_s=9.0),
        view("idle", work_s=0.5, round_trip_s=0.3),
        view("near", work_s=0.5),
        view("broken", broken=True),
        view("stale", fresh=False),
        view("leaving", draining=True),
    ]
    assert idlest(world, tiny, None) == ["near", "idle", "busy", "broken", "stale"]
    only = frozenset({RegionName("busy"), RegionName("stale")})
    assert idlest(world, tiny, only) == ["busy", "stale"]
    assert idlest(world, ModelName("other"), None) == []
    assert idlest(world, tiny, frozenset()) == []
