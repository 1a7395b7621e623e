"""Every field that the official client can send: honoured, or refused by its name."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from core.types import (
    GenerateRequest,
    Message,
    ResponseFormat,
    Tool,
    ToolChoice,
)
from tests.edge.fakes import MODEL, FakeRegion, chat, running_edge, world_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": [1]}}}
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"b": 1, "a": 2}}}
See = Callable[[GenerateRequest], object]


@dataclass(frozen=True)
class Field:
    """`sent` values are taken, and the region then sees `seen`; `refused` ones are 400 by name.
    `more`: what the body needs beside it."""

    sent: tuple[tuple[object, object], ...] = ()
    see: See = lambda _: None
    refused: tuple[object, ...] = ()
    more: dict[str, object] | None = None


def kept(*values: object) -> tuple[tuple[object, object], ...]:
    """Taken, and of no effect on the request."""
    return tuple((value, None) for value in values)


SHARED: dict[str, Field] = {
    "model": Field((("default", MODEL),), lambda r: r.model, refused=(3, None)),
    "frequency_penalty": Field(((1, 1.0),), lambda r: r.sampling.frequency_penalty, refused=(3,)),
    "presence_penalty": Field(((-2, -2.0),), lambda r: r.sampling.presence_penalty, refused=(-3,)),
    "logit_bias": Field(
        (({"5": -3}, ((5, -3.0),)),), lambda r: r.sampling.logit_bias, refused=({"a": 1},)
    ),
    "max_tokens": Field(((7, 7),), lambda r: r.sampling.max_tokens, refused=(0, "x")),
    "n": Field(((1, 1),), lambda r: r.sampling.n, refused=(0, 17)),
    "seed": Field(((9, 9),), lambda r: r.seed, refused=("x",)),
    "stop": Field(
        (("a", ("a",)), (["a", "b"], ("a", "b"))), lambda r: r.sampling.stop, refused=([""],)
    ),
    "stream_options": Field(kept({"include_usage": True, "include_obfuscation": False}),
                            refused=({"include_all": True},), more={"stream": True}),
    "temperature": Field(((0.5, 0.5),), lambda r: r.sampling.temperature, refused=(2.1,)),
    "top_p": Field(((0.5, 0.5),), lambda r: r.sampling.top_p, refused=(1.1,)),
    "user": Field(kept("ann")),
}  # fmt: skip

CHAT_FIELDS: dict[str, Field] = SHARED | {
    "messages": Field(
        (
            ([{"role": "user", "content": "x"}], (Message(role="user", content="x"),)),
            (
                [{"role": "developer", "content": [{"type": "text", "text": "x"}]}],
                (Message(role="developer", content="x"),),
            ),
        ),
        lambda r: r.messages,
        refused=([], None),
    ),
    "max_completion_tokens": Field(((7, 7),), lambda r: r.sampling.max_tokens, refused=(0,)),
    "logprobs": Field(((True, 0),), lambda r: r.sampling.logprobs, refused=(2,)),
    "top_logprobs": Field(((3, 3),), lambda r: r.sampling.logprobs, refused=(21,),
                          more={"logprobs": True}),
    "tools": Field(
        (
            ([TOOL], (Tool(name="f", parameters='{"type":"object","x":[1]}'),)),
            ([{"type": "function", "function": {"name": "g", "description": "d", "strict": True}}],
             (Tool(name="g", description="d", strict=True),)),
            ([], ()),
        ),
        lambda r: r.tools,
        refused=(
            [{"type": "function"}], [{"type": "custom", "custom": {"name": "x"}}], [TOOL, TOOL],
            [{"type": "function", "function": {"name": "no name"}}],
            [{"type": "function", "function": {"name": "f", "parameters": 3}}], "tools",
            [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)],
        ),
    ),
    "tool_choice": Field(
        (
            ("none", (ToolChoice.NONE, "")), ("auto", (ToolChoice.AUTO, "")),
            ("required", (ToolChoice.REQUIRED, "")), (NAMED, (ToolChoice.REQUIRED, "f")),
            (None, (ToolChoice.AUTO, "")),
        ),
        lambda r: (r.tool_choice, r.forced_tool),
        refused=(
            "maybe", {"type": "function", "function": {"name": "g"}}, {"type": "function"},
            {"type": "allowed_tools", "allowed_tools": {}}, {"type": "custom", "custom": {}},
        ),
        more={"tools": [TOOL]},
    ),
    "parallel_tool_calls": Field(((False, False), (None, True)), lambda r: r.parallel_tool_calls,
                                 refused=("x",), more={"tools": [TOOL]}),
    "response_format": Field(
        (
            ({"type": "text"}, None), ({"type": "json_object"}, ResponseFormat()),
            (SCHEMA, ResponseFormat(schema='{"b":1,"a":2}',
                                    param="response_format.json_schema.schema")),
        ),
        lambda r: r.response_format,
        refused=(
            {"type": "json_schema"}, {"type": "yaml"}, {"type": "grammar"}, "json_object",
            {"type": "json_schema", "json_schema": {"name": "x"}},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": "no"}},
            {"type": "json_schema", "json_schema": {"name": "", "schema": {}}},
            {"type": "text", "json_schema": {"name": "x", "schema": {}}},
        ),
    ),
    "metadata": Field(kept({"a": "b"}), refused=({"a": 1},)),
    "safety_identifier": Field(kept("x")),
    "prompt_cache_key": Field(kept("x")),
    "modalities": Field(kept(["text"]), refused=(["text", "audio"],)),
    "store": Field(kept(False), refused=(True,)),
    "service_tier": Field(kept("auto", "default"), refused=("flex", "priority")),
    "prompt_cache_retention": Field(kept("in_memory"), refused=("24h",)),
    "function_call": Field(kept("none", "auto"), refused=({"name": "f"},)),
    "functions": Field(kept([]), refused=([{"name": "f"}],)),
    "audio": Field(refused=({"voice": "alloy", "format": "wav"},)),
    "moderation": Field(refused=({"model": "x"},)),
    "prediction": Field(refused=({"type": "content", "content": "x"},)),
    "prompt_cache_options": Field(refused=({"mode": "explicit"},)),
    "reasoning_effort": Field(kept("none"), refused=("low",)),
    "verbosity": Field(kept("medium"), refused=("low",)),
    "web_search_options": Field(refused=({},)),
}  # fmt: skip

TEXT_FIELDS: dict[str, Field] = SHARED | {
    "prompt": Field(
        (("a", "a"), (["a"], "a"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2))),
        lambda r: r.prompt,
        refused=([], ["a", "b"], [[1], [2]], None),
    ),
    "logprobs": Field(((2, 2),), lambda r: r.sampling.logprobs, refused=(6,)),
    "best_of": Field(kept(1), refused=(2,)),
    "echo": Field(kept(False), refused=(True,)),
    "suffix": Field(kept(""), refused=("x",)),
}

FACES = [
    (CHAT, chat_params.CompletionCreateParamsBase, CHAT_FIELDS),
    (TEXT, text_params.CompletionCreateParamsBase, TEXT_FIELDS),
]


@pytest.mark.parametrize(("path", "params", "fields"), FACES, ids=["chat", "completions"])
def test_the_table_has_every_field_that_the_client_knows(
    path: str, params: type, fields: dict[str, Field]
) -> None:
    assert set(fields) == set(typing.get_type_hints(params))


@pytest.mark.parametrize(("path", "params", "fields"), FACES, ids=["chat", "completions"])
async def test_every_field_is_honoured_or_refused_by_name(
    tmp_path: Path, path: str, params: type, fields: dict[str, Field]
) -> None:
    base: dict[str, Any] = chat() if path == CHAT else {"model": MODEL, "prompt": "Hi"}
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        for name, field in fields.items():
            assert field.sent or field.refused, name
            more = field.more or {}
            for value, seen in field.sent:
                answer = await edge.http.post(path, json={**base, **more, name: value})
                assert answer.status_code == 200, f"{name}={value}: {answer.text}"
                assert field.see(eu.requests[-1]) == seen, f"{name}={value}"
            for value in field.refused:
                answer = await edge.http.post(path, json={**base, **more, name: value})
                assert answer.status_code == 400, f"{name}={value}: {answer.status_code}"
                error = answer.json()["error"]
                where = f"{error['param']} {error['message']}"
                assert name in where, f"{name}={value}: {error}"


async def test_a_required_call_needs_tools(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu, running_edge(world_of(tmp_path, eu)) as edge:
        answer = await edge.http.post(CHAT, json=chat(tool_choice="required"))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tool_choice"
        assert eu.requests == []


# ------------------------------------------------------------------ browsers


async def test_pages_of_named_origins_may_call_and_no_others(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu:
        world = world_of(tmp_path, eu)
        edges = tuple(
            msgspec.structs.replace(one, origins=("https://app.example",))
            for one in world.topology.edges
        )
        named = replace(world, topology=msgspec.structs.replace(world.topology, edges=edges))
        asking = {
            "origin": "https://app.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type",
        }
        async with running_edge(named) as edge:
            before = await edge.http.options(CHAT, headers=asking)
            assert before.status_code < 300
            assert before.headers["access-control-allow-origin"] == "https://app.example"
            assert "POST" in before.headers["access-control-allow-methods"]
            answer = await edge.http.post(CHAT, json=chat(), headers=asking)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
            shown = answer.headers["access-control-expose-headers"]
            assert "x-request-id" in shown
            for what in ("limit", "remaining", "reset"):
                for kind in ("requests", "tokens", "tokens-day"):
                    assert f"x-ratelimit-{what}-{kind}" in shown.split(", ")
            assert "access-control-allow-credentials" not in answer.headers
            refused = await edge.http.post(CHAT, json={}, headers=asking)
            assert refused.headers["access-control-allow-origin"] == "https://app.example"
            other = await edge.http.post(
                CHAT, json=chat(), headers={"origin": "https://evil.example"}
            )
            assert "access-control-allow-origin" not in other.headers
        async with running_edge(world) as edge:
            answer = await edge.http.post(CHAT, json=chat(), headers=asking)
            assert "access-control-allow-origin" not in answer.headers
