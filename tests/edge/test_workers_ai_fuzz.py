"""Generated bodies through the whole edge: never a 500, never a hang, always the dialect's form."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from core.events import Delta, Event, Finish
from core.types import FinishReason, GenerateRequest
from edge.api.workers_ai_types import QueuedBody, RunBody, TwinChatBody, TwinTextBody
from tests.edge.fakes import END, RunningEdge, running_edge, world_of
from tests.edge.mangle import bodies
from tests.edge.test_workers_ai_batch import QUEUE, QueueRegion
from tests.edge.workers_ai_face import AI, CHAT, RUN, WEATHER

HI = [{"role": "user", "content": "Hi"}]
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "x"}]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "y", "tool_call_id": "c", "name": "f"},
]  # fmt: skip
SAMPLED = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "stop": ["a"], "max_tokens": 9}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "auto"}
NATIVE = (
    {"prompt": "x", **SAMPLED},
    {"prompt": "x", "raw": True, "logit_bias": {"5": 1}, "stream": True},
    {"messages": TALK, "tools": [WEATHER], "tool_choice": "required", "stream": True},
    {"messages": HI, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    {"input": TALK, "options": {"rejectIfBusy": True}},
)
OPENAI_CHAT = (
    {"model": "tiny", "messages": TALK, **TOOLS, "stream": True},
    {"model": "tiny", "messages": HI, **SAMPLED, "logprobs": True, "top_logprobs": 2},
    {"model": "tiny", "messages": HI, "stream": True, "stream_options": {"include_usage": True}},
    {"model": "tiny", "messages": HI, "response_format": {
        "type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
)  # fmt: skip
OPENAI_TEXT = (
    {"model": "tiny", "prompt": "x", **SAMPLED, "logprobs": 2},
    {"model": "tiny", "prompt": [1, 2, 3], "stream": True, "n": 2},
)
FACES = {
    RUN: (RunBody.__struct_fields__, NATIVE),
    QUEUE: (
        (*QueuedBody.__struct_fields__, "requests"),
        ({"requests": [NATIVE[0], NATIVE[3]]}, NATIVE[0], {"request_id": "eu.0.0"}),
    ),
    CHAT: (TwinChatBody.__struct_fields__, OPENAI_CHAT),
    f"{AI}/v1/completions": (TwinTextBody.__struct_fields__, OPENAI_TEXT),
}
ANSWER_S = 5.0


async def _one(edge: RunningEdge, path: str, body: bytes) -> int:
    async with asyncio.timeout(ANSWER_S):
        answer = await edge.http.post(path, content=body)
    what = f"{path} {body[:400]!r} → {answer.status_code} {answer.text[:300]}"
    assert answer.status_code < 500, what
    if answer.headers["content-type"].startswith("text/event-stream"):
        data = [x for x in answer.text.split("\n\n") if x and not x.startswith(":")]
        assert data[-1] == "data: [DONE]", what
        assert all(json.loads(one.removeprefix("data: ")) for one in data[:-1]), what
        return answer.status_code
    said = answer.json()
    if "/ai/run/" in path:
        assert said["success"] is (answer.status_code == 200), what
        assert all(type(one["code"]) is int and one["message"] for one in said["errors"]), what
        assert bool(said["errors"]) is not said["success"], what
    elif answer.status_code != 200:
        assert said["error"]["message"], what
        assert said["error"]["code"], what
    return answer.status_code


def _script(request: GenerateRequest) -> list[Event]:
    choices = range(request.sampling.n)
    deltas = [Delta(choice=i, token_ids=(1,), text='{"a": 1}') for i in choices]
    ends = [Finish(choice=i, reason=FinishReason.STOP) for i in choices]
    return [*deltas, *ends, END[1]]


async def fuzz(tmp_path: Path, seed: int, count: int) -> int:
    """How many were answered well."""
    well = 0
    eu = QueueRegion("eu")
    eu.fake.script = _script
    async with eu.serving(), running_edge(world_of(tmp_path, eu.fake)) as edge:
        for path, (fields, good) in FACES.items():
            statuses: Counter[int] = Counter()
            for body in bodies(seed, count, fields, good):
                statuses[await _one(edge, path, body)] += 1
            # some pass and most do not, or nothing was tried
            assert statuses[200] > count / 20, (path, statuses)
            assert statuses[400] > count / 4, (path, statuses)
            well += statuses[200]
        assert edge.admission.in_flight == 0
    return well


async def test_generated_bodies(tmp_path: Path) -> None:
    assert await fuzz(tmp_path, seed=1, count=120) > 50


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 6))
async def test_many_generated_bodies(tmp_path: Path, seed: int) -> None:
    assert await fuzz(tmp_path, seed, count=500) > 200


def test_bodies_are_many_and_repeat() -> None:
    fields, good = FACES[RUN]
    made = list(bodies(3, 500, fields, good))
    assert made == list(bodies(3, 500, fields, good))
    assert len(set(made)) > 350
