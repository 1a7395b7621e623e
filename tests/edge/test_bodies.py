"""Bodies that are no good, and bodies that are odd but fine, through a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import psutil
import pytest

from core.errors import InvalidRequest
from core.types import Message, Sampling, ToolCall
from edge.api.body import decode
from edge.api.openai_types import ChatBody
from tests.edge.fakes import MODEL, FakeRegion, RunningEdge, chat, running_edge, world_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEEP = b"[" * 20_000 + b"]" * 20_000

MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "space": b"  ",
    "array": b"[]",
    "string": b'"hi"',
    "number": b"3",
    "null": b"null",
    "deep": b"[" * 20_000,
    "deep-messages": b'{"model": "tiny", "messages": ' + DEEP + b"}",
    "deep-tools": b'{"model": "tiny", "messages": [], "tools": ' + DEEP + b"}",
    "trailing-comma": b'{"model": "tiny", "messages": [],}',
    "cut": b'{"model": "tiny", "mess',
    "twice": b"{} {}",
    "single-quotes": b"{'model': 'tiny'}",
    "not-utf8": b'{"model": "\xff\xfe"}',
    "nul": b'{"model": "tiny"}\x00',
    "nan": b'{"model": "tiny", "prompt": "x", "messages": [], "temperature": NaN}',
    "infinite": b'{"model": "tiny", "temperature": 1e999}',
    "surrogate": b'{"model": "\\ud800", "messages": []}',
}

CHAT_CASES: dict[str, tuple[dict[str, object], str]] = {
    "no-messages": ({"messages": []}, "messages"),
    "null-messages": ({"messages": None}, "messages"),
    "text-messages": ({"messages": "Hi"}, "messages"),
    "null-message": ({"messages": [None]}, "messages[0]"),
    "no-role": ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    "no-content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "unknown-role": ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "function-role": ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    "number-content": ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "no-parts": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    "text-calls": (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": "no"}]},
        "messages[0].tool_calls",
    ),
    "message-field": (
        {"messages": [{"role": "user", "content": "x", "nmae": "ann"}]},
        "messages[0].nmae",
    ),
    "hot": ({"temperature": "hot"}, "temperature"),
    "too-hot": ({"temperature": 2.5}, "temperature"),
    "cold": ({"temperature": -0.1}, "temperature"),
    "top-p": ({"top_p": 1.5}, "top_p"),
    "no-tokens": ({"max_tokens": 0}, "max_tokens"),
    "half-seed": ({"seed": 1.5}, "seed"),
    "stream-text": ({"stream": "yes"}, "stream"),
    "five-stops": ({"stop": list("abcde")}, "stop"),
    "empty-stop": ({"stop": ["a", ""]}, "stop"),
    "options-alone": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "stop-ids": ({"stop_token_ids": [-1]}, "stop_token_ids"),
    "no-choice": ({"n": 0}, "n"),
    "many-choices": ({"n": 17}, "n"),
    "tools": ({"tools": [{"type": "function"}]}, "tools[0].function"),
    "logprobs": ({"logprobs": 2}, "logprobs"),
    "top-logprobs": ({"top_logprobs": 2}, "top_logprobs"),
    "top-logprobs-none": ({"top_logprobs": 0}, "top_logprobs"),
    "top-logprobs-off": ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
    "top-logprobs-21": ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    "top-logprobs-minus": ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    "top-logprobs-text": ({"top_logprobs": "two", "logprobs": True}, "top_logprobs"),
    "bias-word": ({"logit_bias": {"abc": 1}}, "logit_bias"),
    "bias-negative": ({"logit_bias": {"-1": 1}}, "logit_bias"),
    "bias-zeros": ({"logit_bias": {"05": 1}}, "logit_bias"),
    "bias-digit": ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
    "bias-huge-key": ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    "bias-101": ({"logit_bias": {"5": 101}}, "logit_bias"),
    "bias-minus": ({"logit_bias": {"5": -100.5}}, "logit_bias"),
    "bias-text": ({"logit_bias": {"5": "much"}}, "logit_bias"),
    "bias-list": ({"logit_bias": [1, 2]}, "logit_bias"),
    "bias-many": ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
    "presence": ({"presence_penalty": 2.1}, "presence_penalty"),
    "frequency": ({"frequency_penalty": -2.1}, "frequency_penalty"),
    "repetition": ({"repetition_penalty": 0}, "repetition_penalty"),
    "repetition-high": ({"repetition_penalty": 2.5}, "repetition_penalty"),
    "min-p": ({"min_p": 1.1}, "min_p"),
    "min-tokens": ({"min_tokens": -1}, "min_tokens"),
    "min-over-max": ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    "schema": ({"response_format": {"type": "yaml"}}, "response_format.type"),
    "store": ({"store": True}, "store"),
    "unknown": ({"temprature": 1}, "temprature"),
    "no-model": ({"model": ...}, "model"),
}

TEXT_CASES: dict[str, tuple[dict[str, object], str]] = {
    "negative-id": ({"prompt": [[-1]]}, "prompt"),
    "huge-id": ({"prompt": [2**63]}, "prompt"),
    "half-id": ({"prompt": [1.5]}, "prompt[0]"),
    "mixed": ({"prompt": [5, "a"]}, "prompt"),
    "several": ({"prompt": ["a", "b"]}, "prompt"),
    "none": ({"prompt": []}, "prompt"),
    "missing": ({"prompt": ...}, "prompt"),
    "echo": ({"echo": True}, "echo"),
    "suffix": ({"suffix": "x"}, "suffix"),
    "logprobs": ({"logprobs": 6}, "logprobs"),
    "logprobs-bool": ({"logprobs": True}, "logprobs"),
    "best-of": ({"best_of": 3}, "best_of"),
    "best-of-more": ({"best_of": 3, "n": 2}, "best_of"),
    "min-over-default": ({"min_tokens": 17}, "min_tokens"),
    "chat-field": ({"messages": []}, "messages"),
}


def _filled(base: Mapping[str, object], more: Mapping[str, object]) -> dict[str, object]:
    return {k: v for k, v in {**base, **more}.items() if v is not ...}


async def _good(edge: RunningEdge) -> None:
    assert (await edge.http.post(CHAT, json=chat())).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_malformed(tmp_path: Path, path: str) -> None:
    """B11: never a 500, always OpenAI's form, and the next request works."""
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        for name, body in MALFORMED.items():
            answer = await edge.http.post(path, content=body)
            assert answer.status_code == 400, f"{name}: {answer.status_code} {answer.text[:200]}"
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, name
            code = "invalid_request" if body.strip() else "incomplete_request"
            assert (error["type"], error["code"]) == ("invalid_request_error", code)
            assert error["message"], name
            await _good(edge)
        assert len(eu.requests) == len(MALFORMED)


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (rb"\ud83d", rb"\ud83d"),  # what JSON.stringify makes of a string cut within an emoji
        (rb"so \uD83D and on", rb"\uD83D"),
        (rb"\ude00 alone", rb"\ude00"),
        (rb"\ud83d\ude00\ud83d\u0041", rb"\ud83d"),
        (rb"\\ud83d \\\ud83d", rb"\ud83d"),
    ],
)
def test_half_a_character_is_called_that(text: bytes, half: bytes) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "' + text + b'"}]}'
    with pytest.raises(InvalidRequest) as refused:
        decode(ChatBody, body)
    at = body.rindex(half)
    said = f"{half.decode()} at byte {at} is half a character: the other surrogate is missing"
    assert refused.value.message == f"the body is not JSON: {said}"


@pytest.mark.parametrize("body", [rb'{"model": "\ud83d\ude00', rb'{"model": "\\ud83d', b'{"m'])
def test_a_body_that_is_cut_is_not_called_half_a_character(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="truncated"):
        decode(ChatBody, body)


@pytest.mark.parametrize("stream", [True, False])
async def test_refused_by_name(tmp_path: Path, stream: bool) -> None:
    """B07, B10, B13: wrong values and fields that do not work yet are refused, and named."""
    text: dict[str, object] = {"model": MODEL, "prompt": "Hi"}
    table = [(CHAT, chat(), CHAT_CASES), (TEXT, text, TEXT_CASES)]
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        for path, base, cases in table:
            for name, (more, param) in cases.items():
                if (stream and "stream" in name) or (name == "options-alone" and stream):
                    continue
                body = _filled({**base, "stream": stream}, more)
                answer = await edge.http.post(path, content=json.dumps(body))
                assert answer.status_code == 400, f"{name}: {answer.status_code} {answer.text}"
                error = answer.json()["error"]
                assert error["param"] == param, f"{name}: {error}"
                assert param in error["message"], f"{name}: {error}"
        assert eu.requests == []


async def test_unknown_fields_name_the_nearest(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        answer = await edge.http.post(CHAT, json=chat(temprature=1))
        assert answer.json()["error"]["message"] == (
            "Unrecognized request argument supplied: temprature; did you mean 'temperature'?"
        )
        inner = {"role": "user", "content": "x", "nmae": "y"}
        answer = await edge.http.post(CHAT, json=chat() | {"messages": [inner]})
        assert "; did you mean 'name'?" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_unknown_model(tmp_path: Path, stream: bool) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        answer = await edge.http.post(CHAT, json=chat(stream=stream) | {"model": "@cf/acme/tinny"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'@cf/acme/tinny'" in error["message"]
    assert "does not exist; did you mean '@cf/acme/tiny'?" in error["message"]


async def test_a_model_that_is_like_no_other_names_where_they_are_listed(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        answer = await edge.http.post(CHAT, json=chat() | {"model": "zzz"})
    assert answer.json()["error"]["message"] == (
        "The model 'zzz' does not exist; GET /v1/models lists those that do."
    )


async def test_what_is_accepted(tmp_path: Path) -> None:
    """Neutral values, nulls, parts, roles and limits as OpenAI takes them."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": t} for t in "ab"]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "18 degrees"},
        {"role": "user", "tool_call_id": "c1", "content": ""},
    ]
    neutral = {
        "n": 1,
        "logprobs": False,
        "top_logprobs": None,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "store": False,
        "service_tier": "auto",
        "user": "u",
        "metadata": {"a": "b"},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "stop": None,
        "temperature": 0,
        "top_p": 0,
        "seed": 2**70 + 5,
        "max_tokens": 9,
        "max_completion_tokens": 2**40,
        "top_k": -1,
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
    }
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        answer = await edge.http.post(
            CHAT, json={"model": "default", "messages": messages, **neutral}
        )
        assert answer.status_code == 200, answer.text
        text = {"model": MODEL, "echo": False, "best_of": 1, "suffix": None, "stop": "\n"}
        for prompt in ("Hi", ["Hi"], [5, 6], [[5, 6]]):
            answer = await edge.http.post(TEXT, json={**text, "prompt": prompt})
            assert answer.status_code == 200, answer.text
    first, *others = eu.requests
    assert first.messages == (
        Message(role="developer", content="Be brief."),
        Message(role="user", name="ann", content="ab"),
        Message(role="assistant", tool_calls=(ToolCall(id="c1", name="f", arguments='{"a": '),)),
        Message(role="tool", tool_call_id="c1", content="18 degrees"),
        Message(role="user", content=""),
    )
    sampling = first.sampling
    assert first.seed == 5
    assert sampling.max_tokens == 2**31 - 1
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.0, 0)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((3, 4), True)
    assert [one.prompt for one in others] == ["Hi", "Hi", (5, 6), (5, 6)]
    assert others[0].sampling.stop == ("\n",)
    assert others[0].seed != others[1].seed


async def test_sampling_fields_reach_the_region(tmp_path: Path) -> None:
    fields = {
        "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -2, "frequency_penalty": 2,
        "logit_bias": {"7": -100, "0": 0.5}, "min_tokens": 3, "n": 1,
    }  # fmt: skip
    same = Sampling(
        min_p=0.25, repetition_penalty=1.5, presence_penalty=-2.0, frequency_penalty=2.0,
        logit_bias=((7, -100.0), (0, 0.5)), min_tokens=3,
    )  # fmt: skip
    cases: list[tuple[str, dict[str, object], dict[str, int | None]]] = [
        (CHAT, {"logprobs": True}, {"logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        (CHAT, {"logprobs": False, "max_tokens": 3}, {"max_tokens": 3}),
        (TEXT, {"logprobs": 0, "max_tokens": 9}, {"logprobs": 0, "max_tokens": 9}),
        (TEXT, {"logprobs": 5, "max_tokens": 9}, {"logprobs": 5, "max_tokens": 9}),
    ]
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        for path, more, wanted in cases:
            base = chat() if path == CHAT else {"model": MODEL, "prompt": "Hi"}
            answer = await edge.http.post(path, json={**base, **fields, **more})
            assert answer.status_code == 200, answer.text
            assert eu.requests[-1].sampling == msgspec.structs.replace(same, **wanted)


async def _upload(piece: bytes, count: int) -> AsyncIterator[bytes]:
    yield b'{"model": "tiny", "prompt": "Hi"'
    for _ in range(count):
        yield piece
    yield b"}"


async def test_chunked_uploads_are_counted(tmp_path: Path) -> None:
    """B11: under the limit they work, over it 413 comes early and nothing is kept."""
    limit = 1 << 20
    async with FakeRegion("eu").serving() as eu:
        world = world_of(tmp_path, eu, limits=f"body_bytes = {limit}")
        async with running_edge(world) as edge:
            good = await edge.http.post(TEXT, content=_upload(b" " * 1024, 1000))
            assert good.status_code == 200
            before = psutil.Process().memory_info().rss
            sent = 0

            async def endless() -> AsyncIterator[bytes]:
                nonlocal sent
                async for piece in _upload(b" " * 65536, 800):
                    sent += len(piece)
                    yield piece

            answer = await edge.http.post(TEXT, content=endless())
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
            assert psutil.Process().memory_info().rss - before < 16 << 20
            promised = await edge.http.post(TEXT, content=b" " * (limit + 1))
            assert promised.status_code == 413
            await _good(edge)


async def test_a_promised_length_is_refused_before_the_body(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        host, port = edge.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999999\r\n\r\n"
        )
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readuntil(b"}}")
        writer.close()
        await writer.wait_closed()
    assert head.startswith(b"HTTP/1.1 413 ")
    assert json.loads(body)["error"]["code"] == "body_too_large"


async def test_chunks_of_one_byte_and_a_body_that_never_ends(tmp_path: Path) -> None:
    """B11, B25: odd uploads neither break the edge nor hold it."""
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        host, port = edge.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(chat()).encode()
        pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            + pieces
        )
        async with asyncio.timeout(30):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await writer.wait_closed()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{"
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        await _good(edge)
        assert len(eu.requests) == 2
