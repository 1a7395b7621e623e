"""What callers see when regions fail, and what regions see when callers leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from core.config import Topology
from core.events import Accepted, Done, Event
from core.types import GenerateRequest, NodeName
from tests.edge.fakes import (
    END,
    USAGE,
    Cut,
    FakeRegion,
    Hold,
    RunningEdge,
    chat,
    delta,
    fault,
    running_edge,
    saying,
    world_of,
)

LONG = "a prompt that is well above the bound of short ones. " * 40


async def _streamed(edge: RunningEdge) -> tuple[httpx.Response, list[str]]:
    answer = await edge.http.post("/v1/chat/completions", json=chat(stream=True))
    lines = [one for one in answer.text.split("\n") if one and not one.startswith(":")]
    return answer, lines


@pytest.mark.parametrize(
    "first",
    [
        [fault("node_lost")],
        [fault("no_capacity", retry_after_s=7.0)],
        [fault("draining")],
        [Cut()],
        [],
    ],
    ids=["node-lost", "no-capacity", "draining", "cut", "ends-early"],
)
async def test_failover_before_the_first_delta(tmp_path: Path, first: list[Event]) -> None:
    """B22: a quiet retry while nothing was sent; one role, one id, one finish."""
    eu, us = FakeRegion("eu", script=lambda _: first), FakeRegion("us")
    async with eu.serving(), us.serving(), running_edge(world_of(tmp_path, eu, us)) as edge:
        answer, lines = await _streamed(edge)
    assert answer.status_code == 200
    assert answer.headers["x-skerry-region"] == "us"
    assert answer.headers["x-skerry-route"] == "failover"
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(one.removeprefix("data: ")) for one in lines[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello there!"
    assert sum("role" in c["choices"][0]["delta"] for c in chunks) == 1
    assert eu.requests[0].seed == us.requests[0].seed
    assert us.requests[0].deadline_s <= eu.requests[0].deadline_s


async def test_failover_when_a_region_is_not_there(tmp_path: Path) -> None:
    eu, us = FakeRegion("eu", refuses_with=503), FakeRegion("us")
    async with eu.serving(), us.serving(), running_edge(world_of(tmp_path, eu, us)) as edge:
        answer = await edge.http.post("/v1/chat/completions", json=chat())
        assert answer.headers["x-skerry-region"] == "us"
        page = (await edge.http.get("/metrics")).text
    assert 'skerry_edge_failovers_total{code="region_unavailable",region="eu"} 1.0' in page


async def test_a_region_that_dies_is_left_and_taken_again(tmp_path: Path) -> None:
    eu, us = FakeRegion("eu"), FakeRegion("us")
    async with us.serving():
        async with eu.serving():
            world = world_of(tmp_path, eu, us)
            async with running_edge(world) as edge:
                first = await edge.http.post("/v1/chat/completions", json=chat())
                assert first.headers["x-skerry-region"] == "eu"
        async with running_edge(world, fresh=1) as edge:
            second = await edge.http.post("/v1/chat/completions", json=chat())
            assert second.headers["x-skerry-region"] == "us"
            assert second.headers["x-skerry-route"] == "nearest_short"


async def test_moved_names_the_new_nodes(tmp_path: Path) -> None:
    moved = Accepted(prefill=None, decode=NodeName("eu-decode-2"), prompt_tokens=3, reason="alone")
    eu = FakeRegion("eu", accepts=False, script=lambda _: [moved, delta("x"), *END])
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge:
        answer = await edge.http.post("/v1/chat/completions", json=chat())
    assert answer.headers["x-skerry-decode"] == "eu-decode-2"
    assert "x-skerry-prefill" not in answer.headers


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ([fault("node_lost")], "node_lost"),
        ([Cut()], "incomplete_stream"),
        ([], "incomplete_stream"),
        ([Done(usage=USAGE)], "incomplete_stream"),
    ],
    ids=["fault", "cut", "ends-early", "no-finish"],
)
async def test_fault_after_the_first_delta(tmp_path: Path, last: list[Event], code: str) -> None:
    """B22: an error event and the close, no [DONE], no made-up finish, no second answer."""
    gates = [asyncio.Event(), asyncio.Event()]
    eu = FakeRegion("eu")
    eu.script = lambda _: [delta("Hel"), delta("lo"), Hold(gates[len(eu.requests) - 1]), *last]
    us = FakeRegion("us")
    async with eu.serving(), us.serving(), running_edge(world_of(tmp_path, eu, us)) as edge:
        text = ""
        async with edge.http.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True)
        ) as answer:
            async for piece in answer.aiter_text():
                text += piece
                gates[0].set()
        lines = [one for one in text.split("\n") if one and not one.startswith(":")]
        assert answer.status_code == 200
        assert "[DONE]" not in text
        assert '"finish_reason":"' not in text
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == (code, "server_error")
        assert us.requests == []
        # the official client raises instead of ending quietly
        async with openai.AsyncOpenAI(
            base_url=f"{edge.url}/v1", api_key="none", max_retries=0
        ) as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            await anext(stream)
            gates[1].set()
            with pytest.raises(openai.APIError):
                _ = [chunk async for chunk in stream]


@pytest.mark.parametrize("stream", [True, False])
async def test_refusals_are_real_statuses(tmp_path: Path, stream: bool) -> None:
    """B12, B24: what is known before the first delta is a status, not an event."""
    refusal = fault("context_length_exceeded", "9000 tokens are over 8192", param="messages")
    eu, us = FakeRegion("eu", accepts=False, script=lambda _: [refusal]), FakeRegion("us")
    async with eu.serving(), us.serving(), running_edge(world_of(tmp_path, eu, us)) as edge:
        answer = await edge.http.post("/v1/chat/completions", json=chat(stream=stream))
        assert us.requests == []
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"] == {
        "message": "9000 tokens are over 8192",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


async def test_no_capacity_anywhere_says_when(tmp_path: Path) -> None:
    busy = [fault("no_capacity", "the queue is full", retry_after_s=2.2)]
    eu = FakeRegion("eu", accepts=False, script=lambda _: busy)
    us = FakeRegion("us", refuses_with=500)
    async with eu.serving(), us.serving():
        world = world_of(tmp_path, eu, us, limits="hold = 0")
        async with running_edge(world) as edge:
            answer = await edge.http.post("/v1/chat/completions", json=chat(stream=True))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["code"] == "no_capacity"
    assert answer.json()["error"]["type"] == "rate_limit_error"


async def test_no_region_at_all(tmp_path: Path) -> None:
    eu = FakeRegion("eu", address="127.0.0.1:1")
    async with running_edge(world_of(tmp_path, eu), fresh=0) as edge:
        answer = await edge.http.post("/v1/chat/completions", json=chat())
        ready = await edge.http.get("/readyz")
    assert (answer.status_code, ready.status_code) == (503, 503)
    assert answer.json()["error"]["code"] == "region_unavailable"
    assert ready.text == "no region can answer\n"


@pytest.fixture
def leaves_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake region that is told of a cancel goes on: its connection is cut after this time."""
    monkeypatch.setattr("edge.region_stream.LEAVE_S", 0.3)


@pytest.mark.usefixtures("leaves_soon")
async def test_deadline(tmp_path: Path) -> None:
    gate = asyncio.Event()
    eu = FakeRegion("eu", script=lambda _: [Hold(gate)])
    async with eu.serving():
        world = world_of(tmp_path, eu, limits="deadline_s = 0.3")
        async with running_edge(world) as edge:
            answer = await edge.http.post("/v1/chat/completions", json=chat())
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "deadline_exceeded"
            (request,) = eu.requests
            async with asyncio.timeout(30):
                await eu.left[request.id].wait()
            assert eu.cancels == [request.id]


@pytest.mark.usefixtures("leaves_soon")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False], ids=["mid-answer", "before-first"])
async def test_a_caller_who_leaves_frees_the_region(
    tmp_path: Path, stream: bool, begun: bool
) -> None:
    """B25: closed connection and cancel message, streamed or not."""
    gate = asyncio.Event()
    before: list[Event] = [delta("a")] if begun else []
    eu = FakeRegion("eu", script=lambda _: [*before, Hold(gate), *END])
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge:
        host, port = edge.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(chat(stream=stream)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        if begun and stream:
            await reader.readuntil(b'"content":"a"')
        async with asyncio.timeout(30):
            while not eu.requests:
                await asyncio.sleep(0)
        writer.close()
        (request,) = eu.requests
        async with asyncio.timeout(30):
            await eu.left[request.id].wait()
            while eu.cancels != [request.id] or edge.admission.in_flight:
                await asyncio.sleep(0.01)
        await writer.wait_closed()
        again = await edge.http.get("/metrics")
    assert 'skerry_edge_requests_total{dialect="chat",outcome="cancelled"} 1.0' in again.text
    assert "skerry_edge_in_flight 0.0" in again.text


async def test_a_finished_request_is_not_cancelled(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        await edge.http.post("/v1/chat/completions", json=chat())
        await _streamed(edge)
    assert len(eu.requests) == 2
    assert eu.cancels == []


async def test_admission_and_draining(tmp_path: Path) -> None:
    gate = asyncio.Event()
    eu = FakeRegion("eu", script=lambda _: [Hold(gate), delta("a"), *END])
    async with eu.serving(), running_edge(world_of(tmp_path, eu), limit=1) as edge:
        first = asyncio.create_task(edge.http.post("/v1/chat/completions", json=chat()))
        async with asyncio.timeout(30):
            while not eu.requests:
                await asyncio.sleep(0)
        full = await edge.http.post("/v1/chat/completions", json=chat())
        edge.admission.rest(True)
        resting = await edge.http.get("/readyz")
        edge.admission.drain()
        closed = await edge.http.post("/v1/chat/completions", json=chat())
        ready = await edge.http.get("/readyz")
        gate.set()
        assert (await first).status_code == 200
    assert (full.status_code, full.json()["error"]["code"]) == (429, "no_capacity")
    assert (closed.status_code, closed.json()["error"]["code"]) == (503, "draining")
    assert closed.headers["retry-after"] == "1"
    assert (resting.status_code, ready.status_code) == (503, 503)
    assert resting.text == "this edge takes nothing new (drained)\n"
    assert ready.text == "this edge is shutting down\n"


async def test_two_edges_agree_on_the_region(tmp_path: Path) -> None:
    """The product's idea: the same prefix lands in one region from edges far apart."""
    eu, us = FakeRegion("eu", script=saying("e")), FakeRegion("us", script=saying("u"))
    async with eu.serving(), us.serving():
        world = world_of(tmp_path, eu, us)
        async with running_edge(world, "here") as here, running_edge(world, "there") as there:
            taken = set()
            for i in range(12):
                asked = [f"document {i}. {LONG * 6}" + question for question in ("Why?", "When?")]
                a = await here.http.post("/v1/chat/completions", json=chat(asked[0]))
                b = await there.http.post("/v1/chat/completions", json=chat(asked[1]))
                assert a.headers["x-skerry-region"] == b.headers["x-skerry-region"]
                assert a.headers["x-skerry-route"] == "prefix_home"
                taken.add(a.headers["x-skerry-region"])
            short = [
                (await edge.http.post("/v1/chat/completions", json=chat("Hi"))).headers
                for edge in (here, there)
            ]
            by_id = [
                await edge.http.post(
                    "/v1/chat/completions",
                    json=chat("Hi") | more,
                    headers=headers,
                )
                for edge, more, headers in (
                    (here, {"prompt_cache_key": "session-7"}, {}),
                    (there, {}, {"x-session-affinity": "session-7"}),
                )
            ]
    assert taken == {"eu", "us"}
    assert [one["x-skerry-region"] for one in short] == ["eu", "us"]
    assert {one.headers["x-skerry-route"] for one in by_id} == {"affinity"}
    assert len({one.headers["x-skerry-region"] for one in by_id}) == 1


async def test_simulated_round_trips(tmp_path: Path) -> None:
    eu = FakeRegion("eu")
    async with eu.serving():
        world = world_of(tmp_path, eu, more="simulate_round_trips = true")
        assert isinstance(world.topology, Topology)
        took: dict[str, float] = {}
        for name in ("here", "there"):
            async with running_edge(world, name) as edge:
                begun = asyncio.get_running_loop().time()
                await edge.http.post("/v1/chat/completions", json=chat())
                took[name] = asyncio.get_running_loop().time() - begun
    assert took["here"] >= 0.010
    assert took["there"] >= 0.090


async def test_a_caller_who_reads_slowly_makes_the_region_wait(tmp_path: Path) -> None:
    """Nothing piles up on the way: what is written and not read is what buffers hold."""
    written = 0

    def script(_: GenerateRequest) -> Iterator[Event]:
        nonlocal written
        for number in range(1000):
            written += 1
            yield delta("x" * 100_000, number)
        yield from END

    eu = FakeRegion("eu", script=script)
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge:
        host, port = edge.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(chat(stream=True)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        before = -1
        async with asyncio.timeout(30):
            while written != before or not written:  # until it stands still
                before = written
                await asyncio.sleep(0.3)
        assert written < 200  # of a thousand: 20 MB, nearly all of it in the kernel's buffers
        async with asyncio.timeout(30):
            while written < before + 100:  # and goes on when it is read
                assert await reader.read(1 << 20)
        writer.transport.abort()


async def test_a_caller_who_never_reads_frees_the_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.api.wire.STALL_S", 0.3)
    eu = FakeRegion("eu", script=lambda _: [delta("x" * 100_000, i) for i in range(1000)])
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge:
        host, port = edge.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(chat(stream=True)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        async with asyncio.timeout(30):
            while not eu.requests:
                await asyncio.sleep(0.01)
            await eu.left[eu.requests[0].id].wait()
            while edge.admission.in_flight:
                await asyncio.sleep(0.01)
        assert eu.cancels == [eu.requests[0].id]
        writer.transport.abort()
