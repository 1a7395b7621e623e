"""Answers through a real server: the official client, the shape of chunks, headers, heartbeats."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest

from core.events import Delta, Done, Finish
from core.types import FinishReason
from tests.edge.fakes import (
    END,
    TIMINGS,
    USAGE,
    FakeRegion,
    Hold,
    RunningEdge,
    chat,
    delta,
    running_edge,
    world_of,
)


def _client(edge: RunningEdge) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{edge.url}/v1",
        api_key="none",
        max_retries=0,
    )


def _payloads(body: str) -> list[str]:
    return [line.removeprefix("data: ") for line in body.split("\n") if line.startswith("data: ")]


async def test_official_client_one_shot(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        async with _client(edge) as client:
            answer = await client.chat.completions.create(
                model="default", messages=[{"role": "user", "content": "Hi"}], seed=-1
            )
            assert answer.object == "chat.completion"
            assert answer.model == "default"
            assert answer.id.startswith("chatcmpl-")
            choice = answer.choices[0]
            assert (choice.message.role, choice.message.content) == ("assistant", "Hello there!")
            assert (choice.finish_reason, choice.index, choice.logprobs) == ("stop", 0, None)
            assert answer.usage is not None
            assert answer.usage.total_tokens == 15
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == USAGE.cached_tokens
            text = await client.completions.create(model="tiny", prompt="Hi")
            assert (text.object, text.choices[0].text) == ("text_completion", "Hello there!")
        chat_request, text_request = eu.requests
        assert chat_request.model == "tiny"
        assert chat_request.seed == 2**64 - 1
        assert chat_request.sampling.max_tokens is None
        assert text_request.sampling.max_tokens == 16
        assert text_request.sampling.max_tokens_yields


async def test_official_client_stream(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        async with _client(edge) as client:
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "Hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(texts) == "Hello there!"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize("want", [True, False])
async def test_usage_chunk_and_identity(tmp_path: Path, route: str, want: bool) -> None:
    """B04."""
    text: dict[str, object] = {"model": "tiny", "prompt": "Hi"}
    body = chat() if route == "chat" else text
    path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
    if want:
        body["stream_options"] = {"include_usage": True}
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        answer = await edge.http.post(path, json={**body, "stream": True})
        one = (await edge.http.post(path, json=body | {"stream_options": None})).json()
    payloads = _payloads(answer.text)
    assert payloads[-1] == "[DONE]"
    chunks = [json.loads(payload) for payload in payloads[:-1]]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert isinstance(chunks[0]["created"], int)
    bare = [i for i, c in enumerate(chunks) if not c["choices"]]
    if want:
        assert bare == [len(chunks) - 1]
        assert all(c["usage"] is None for c in chunks[:-1])
        assert chunks[-1]["usage"] == one["usage"]
    else:
        assert bare == []
        assert all("usage" not in c for c in chunks)
    finishes = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert finishes[-1] == "stop"
    assert set(finishes[:-1]) == {None}


async def test_headers_and_trace(tmp_path: Path) -> None:
    """B24: nothing between the edge and the caller may buffer or cut a stream."""
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        answer = await edge.http.post(
            "/v1/chat/completions", json=chat(stream=True), headers={"accept-encoding": "gzip"}
        )
        whole = await edge.http.post("/v1/chat/completions", json=chat())
    head = answer.headers
    assert head["content-type"].startswith("text/event-stream")
    assert (head["cache-control"], head["x-accel-buffering"]) == ("no-cache", "no")
    assert "content-encoding" not in head
    assert "content-length" not in head
    for one in (answer, whole):
        assert one.headers["x-request-id"]
        assert one.headers["x-skerry-region"] == "eu"
        assert one.headers["x-skerry-route"] == "nearest_short"
        assert one.headers["x-skerry-prefill"] == "eu-prefill-1"
        assert one.headers["x-skerry-decode"] == "eu-decode-1"
    assert "queue;dur=1.0, prefill;dur=20.0" in whole.headers["server-timing"]
    lines = [line for line in answer.text.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert lines[-2].startswith(": skerry ")
    traces = [json.loads(lines[-2].removeprefix(": skerry ")), whole.headers["x-skerry-trace"]]
    for trace in (traces[0], json.loads(traces[1])):
        assert trace == {
            "edge": "here",
            "region": "eu",
            "prefill": "eu-prefill-1",
            "decode": "eu-decode-1",
            "reason": "nearest_short",
            "node_reason": "split",
            "queue_s": TIMINGS.queue_s,
            "prefill_s": TIMINGS.prefill_s,
            "decode_s": TIMINGS.decode_s,
            "transfer_s": TIMINGS.transfer_s,
            "kv_bytes": TIMINGS.kv_bytes,
        }


async def test_events_come_when_made_and_silence_is_filled(tmp_path: Path) -> None:
    """B24: each event is on the wire when produced; comments keep a quiet stream alive."""
    gate = asyncio.Event()
    eu = FakeRegion("eu", script=lambda _: [delta("a"), Hold(gate), delta("b"), *END])
    async with eu.serving(), running_edge(world_of(tmp_path, eu), heartbeat_s=0.1) as edge:
        seen = ""
        async with edge.http.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True)
        ) as answer:
            async for text in answer.aiter_text():
                seen += text
                if seen.count(": waiting\n\n") == 2 and not gate.is_set():
                    assert '"content":"a"' in seen
                    assert '"content":"b"' not in seen
                    gate.set()
    assert _payloads(seen)[-1] == "[DONE]"
    assert '"content":"b"' in seen
    for block in seen.split("\n\n"):
        assert block == "" or block.count("\n") == 0, f"not whole events: {block!r}"


async def test_silence_before_the_first_delta(tmp_path: Path) -> None:
    gate = asyncio.Event()
    eu = FakeRegion("eu", script=lambda _: [Hold(gate), delta("late"), *END])
    body = {"model": "tiny", "prompt": "x", "stream": True}
    async with (
        eu.serving(),
        running_edge(world_of(tmp_path, eu), heartbeat_s=0.1) as edge,
        edge.http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        assert "x-skerry-region" not in answer.headers
        seen = ""
        async for text in answer.aiter_text():
            seen += text
            gate.set()
    assert seen.startswith(": waiting\n\n")
    assert '"text":"late"' in seen


async def test_all_events_of_one_read_in_one_write(tmp_path: Path) -> None:
    lump = (*(delta(f"{i} ", i) for i in range(50)), *END)
    eu = FakeRegion("eu", script=lambda _: [lump])
    async with (
        eu.serving(),
        running_edge(world_of(tmp_path, eu)) as edge,
        edge.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer,
    ):
        reads = [read async for read in answer.aiter_raw()]
    assert len(_payloads(b"".join(reads).decode())) == 53
    assert len(reads) <= 4


async def test_empty_texts_show_nothing(tmp_path: Path) -> None:
    """A delta may carry half a character: no empty chunk goes out for it."""
    eu = FakeRegion(
        "eu",
        script=lambda _: [
            Delta(token_ids=(1,)),
            delta("é"),
            Finish(reason=FinishReason.LENGTH),
            Done(usage=USAGE),
        ],
    )
    async with eu.serving(), running_edge(world_of(tmp_path, eu)) as edge:
        answer = await edge.http.post(
            "/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True}
        )
    chunks = [json.loads(one) for one in _payloads(answer.text)[:-1]]
    assert [c["choices"][0]["text"] for c in chunks] == ["é"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
