"""Bodies that nobody would write: never a 500, never a hang, and the edge lives on."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.errors import InvalidRequest
from core.text.model import load_text
from core.types import GenerateRequest, Message, ModelName, RequestId, ResponseFormat, Tool
from core.types import ToolChoice as Choice
from tests.edge.fakes import MODEL, FakeRegion, chat, running_edge, world_of
from tests.tiny_text import write_tiny_folder

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SOME, MANY = 300, 2000
AT_ONCE = 24
HOW_MANY = pytest.mark.parametrize(
    "count", [SOME, pytest.param(MANY, marks=pytest.mark.soak)], ids=["some", "many"]
)

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "string", "pattern": "^a+$", "maxLength": 3}},
    "required": ["a"], "additionalProperties": False, "$defs": {"x": {"$ref": "#"}},
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
GOOD: dict[str, Any] = {
    "model": MODEL, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 3,
    "max_tokens": 5, "min_tokens": 1, "n": 1, "stop": ["x"], "stream": False,
    "logit_bias": {"5": 1}, "frequency_penalty": 1, "presence_penalty": 1,
    "repetition_penalty": 1.1, "stop_token_ids": [4], "ignore_eos": False, "user": "u",
    "metadata": {"a": "b"}, "store": False,
}  # fmt: skip
CHATTY: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": [
            {"type": "text", "text": "t"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "r"}],
    "logprobs": True, "top_logprobs": 2, "tools": [TOOL], "tool_choice": "auto",
    "parallel_tool_calls": True, "stream_options": None,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "max_completion_tokens": 9, "modalities": ["text"], "service_tier": "auto",
}  # fmt: skip
TEXTUAL: dict[str, Any] = {"prompt": "p", "logprobs": 2, "echo": False, "suffix": None}

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 0.5, -0.0, 1e308, "", "x", "\u0000",
    "é👩‍👩‍👧", "<|im_end|>", "\ud83d", "a" * 3000,
    [], [[]], [None], {}, {"": {}}, {"type": "x"}, [1, "a"],
    {"a": [{"b": None}]}, "none", "required", "json_object", [[[[[[[[]]]]]]]], "NaN", "$ref", -1.5,
]  # fmt: skip


def odd(dice: random.Random) -> Any:
    return dice.choice(ODD)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    inner: Any = ()
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner:
        found += places(one, (*path, key))
    return found


def change(dice: random.Random, body: dict[str, Any]) -> None:
    """One place of `body`: another value, gone, twice, or with something new beside it."""
    path = dice.choice(places(body))
    holder: Any = body
    for key in path[:-1]:
        holder = holder[key]
    match dice.randrange(5):
        case 0 | 1:
            holder[path[-1]] = odd(dice)
        case 2:
            del holder[path[-1]]
        case 3 if isinstance(holder, list):
            holder.extend([holder[path[-1]]] * dice.choice([1, 3, 200]))
        case _ if isinstance(holder, dict):
            holder[dice.choice(["x", "type", "$ref", "role", "", "é", "arguments"])] = odd(dice)


def body_of(dice: random.Random) -> tuple[str, bytes]:
    path = dice.choice([CHAT, CHAT, TEXT])
    base = {**GOOD, **(CHATTY if path == CHAT else TEXTUAL)}
    needed = ("model", "messages", "prompt")
    body = {k: v for k, v in base.items() if k in needed or dice.random() < 0.4}
    body = json.loads(json.dumps(body))
    for _ in range(dice.choice([0, 1, 1, 2, 4])):
        if places(body):
            change(dice, body)
    raw = json.dumps(body).encode()
    if dice.random() < 0.1:  # broken bytes
        cut = dice.randrange(len(raw))
        raw = raw[:cut] + dice.choice([b"", b"\xff", b"}", b"\x00", b",,", b"[" * 300]) + raw[cut:]
    return path, raw


@HOW_MANY
async def test_no_body_makes_the_edge_fail(tmp_path: Path, count: int) -> None:
    statuses: Counter[int] = Counter()

    async def send(http: httpx.AsyncClient, seed: int) -> None:
        path, raw = body_of(random.Random(seed))
        async with asyncio.timeout(30):
            answer = await http.post(path, content=raw)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, f"seed {seed}: {answer.status_code} {raw[:300]!r}"
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["message"], f"seed {seed}"
            assert set(error) == {"message", "type", "param", "code"}, f"seed {seed}"

    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        for start in range(0, count, AT_ONCE):
            async with asyncio.TaskGroup() as tasks:
                for seed in range(start, min(count, start + AT_ONCE)):
                    tasks.create_task(send(edge.http, seed))
        assert (await edge.http.post(CHAT, json=chat())).status_code == 200
    assert statuses[200] > count // 10
    assert statuses[400] > count // 10


# ------------------------------------------------------------------ the region's part


def schema_of(dice: random.Random) -> Any:
    """A schema with parts in the wrong places, of the wrong kinds, or in a circle."""
    keywords: dict[str, Callable[[], Any]] = {
        "type": lambda: dice.choice(["object", "string", "integer", ["null", "array"], "x", 3]),
        "properties": lambda: {dice.choice("ab"): schema_of(dice)},
        "items": lambda: schema_of(dice),
        "anyOf": lambda: [schema_of(dice) for _ in range(dice.randrange(3))],
        "oneOf": lambda: [schema_of(dice)],
        "allOf": lambda: [schema_of(dice), {}],
        "$ref": lambda: dice.choice(["#", "#/$defs/x", "#/properties/a", "http://x/y", ""]),
        "$defs": lambda: {"x": schema_of(dice)},
        "pattern": lambda: dice.choice(["^a*$", "(", "(a|b)*c{3,5}", "\\p{L}+", ".{1000,}"]),
        "enum": lambda: [odd(dice) for _ in range(dice.randrange(4))],
        "required": lambda: dice.choice([["a"], "a", ["a", "a"], [1]]),
        "minLength": lambda: odd(dice), "maxItems": lambda: odd(dice),
        "minimum": lambda: odd(dice), "multipleOf": lambda: odd(dice),
        "format": lambda: dice.choice(["date", "zzz", 3]), "const": lambda: odd(dice),
        "additionalProperties": lambda: dice.choice([True, False, schema_of(dice)]),
        "not": dict, "uniqueItems": lambda: dice.choice([True, False]),
        "patternProperties": lambda: {dice.choice(["^a", "("]): schema_of(dice)},
    }  # fmt: skip
    if dice.random() < 0.1:
        return odd(dice)
    return {key: keywords[key]() for key in dice.sample(sorted(keywords), dice.randrange(1, 4))}


@HOW_MANY
def test_no_schema_makes_the_region_fail(tmp_path: Path, count: int) -> None:
    text = load_text(write_tiny_folder(tmp_path / "tiny"))
    kept = refused = 0
    for seed in range(count):
        dice = random.Random(seed)
        given = json.dumps(schema_of(dice))
        request = GenerateRequest(
            id=RequestId("r"), model=ModelName("m"), seed=1, rendered_at=0,
            messages=(Message(role="user", content="x"),),
            tools=(Tool(name="f", parameters=given, strict=dice.random() < 0.5),)
            if dice.random() < 0.5 else (),
            tool_choice=dice.choice([Choice.AUTO, Choice.REQUIRED]),
            response_format=ResponseFormat(schema=given) if dice.random() < 0.7 else None,
        )  # fmt: skip
        try:
            text.grammar(request)
            kept += 1
        except InvalidRequest:
            refused += 1
    assert kept > count // 10
    assert refused > count // 10
