"""A REST client in Workers AI's form runs all its calls against two regions and the real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.launcher import LocalWorld
from tests.world.workers_client import MODEL, CloudflareError, WorkersAI

pytestmark = [pytest.mark.world, pytest.mark.model]

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["c", "f"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
ASK = [{"role": "user", "content": "What is the weather in Paris in celsius? Use the tool."}]
COUNTRY: dict[str, Any] = {
    "type": "object",
    "properties": {"capital": {"enum": ["Paris", "Rome"]}, "people": {"enum": [1, 2, 3]}},
    "required": ["capital", "people"],
    "additionalProperties": False,
}


@pytest.fixture
def ai(real: LocalWorld) -> Iterator[WorkersAI]:
    with WorkersAI(real.edges["nyc"]) as client:
        yield client


def _fits(arguments: dict[str, Any], schema: dict[str, Any]) -> None:
    assert list(arguments) == list(schema["properties"])
    for name, value in arguments.items():
        assert value in schema["properties"][name]["enum"]


def test_run_streamed_and_not(ai: WorkersAI) -> None:
    asked = {"prompt": "What is the capital of France?", "temperature": 0, "max_tokens": 12}
    result = ai.run(MODEL, **asked)
    assert "Paris" in result["response"]
    events = list(ai.stream(MODEL, **asked))
    assert "".join(one["response"] for one in events) == result["response"]
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == result["usage"]["completion_tokens"]
    assert usage["prompt_tokens"] == result["usage"]["prompt_tokens"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert ai.run(MODEL, **{**asked, "prompt": None, "messages": messages}) | {"usage": 0} == {
        **result, "usage": 0,
    }  # fmt: skip
    twin = ai.chat(model=MODEL, messages=messages, temperature=0, max_tokens=12)
    assert twin["choices"][0]["message"]["content"] == result["response"]
    assert MODEL in ai.models(search="smollm2")


def test_json_mode_gives_an_object(ai: WorkersAI) -> None:
    form = {"type": "json_schema", "json_schema": COUNTRY}
    result = ai.run(MODEL, prompt="Tell me about France.", response_format=form, temperature=0)
    _fits(result["response"], COUNTRY)
    with pytest.raises(CloudflareError) as cut:
        ai.run(MODEL, prompt="France", response_format=form, max_tokens=3)
    assert (cut.value.status, cut.value.code) == (400, 5024)
    impossible = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(["}}}
    with pytest.raises(CloudflareError) as odd:
        ai.run(MODEL, prompt="x", response_format={**form, "json_schema": impossible})
    assert (odd.value.status, odd.value.code) == (400, 8001)
    assert "response_format.json_schema" in odd.value.message


def test_a_forced_tool_and_the_answer_to_it(ai: WorkersAI) -> None:
    asked: dict[str, Any] = {
        "messages": ASK, "tools": [WEATHER], "tool_choice": "required", "temperature": 0,
        "max_tokens": 90,
    }  # fmt: skip
    result = ai.run(MODEL, **asked)
    assert result["finish_reason"] == "tool_calls"
    [call] = result["tool_calls"]
    assert call["name"] == "get_weather"
    _fits(call["arguments"], WEATHER["parameters"])
    events = list(ai.stream(MODEL, **asked))
    streamed = [one for event in events for one in event.get("tool_calls", ())]
    assert [(one["name"], one["arguments"]) for one in streamed] == [
        (call["name"], call["arguments"])
    ]
    assert events[-1]["finish_reason"] == "tool_calls"
    turns = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["name"],
            "content": "21 c, sunny",
        },
    ]
    answer = ai.run(MODEL, messages=turns, temperature=0, max_tokens=24)
    assert answer["response"].strip()
    twin = ai.chat(model=MODEL, **{**asked, "tools": [{"type": "function", "function": WEATHER}]})
    [said] = twin["choices"][0]["message"]["tool_calls"]
    assert json.loads(said["function"]["arguments"]) == call["arguments"]


def test_a_batch_answers_as_its_requests_would(ai: WorkersAI, real: LocalWorld) -> None:
    form = {"type": "json_schema", "json_schema": COUNTRY}
    requests: list[dict[str, Any]] = [
        {"prompt": "What is the capital of France?", "temperature": 0, "max_tokens": 12},
        {"prompt": "Tell me about France.", "response_format": form, "temperature": 0},
        {"prompt": "word " * 20_000, "external_reference": "too long"},
    ]
    name = ai.queue(MODEL, *requests)
    with WorkersAI(real.edges["ams"]) as other:  # any edge leads to the region that has it
        capital, country, long = other.wait(MODEL, name)["responses"]
    assert capital["result"]["response"] == ai.run(MODEL, **requests[0])["response"]
    _fits(country["result"]["response"], COUNTRY)
    assert (long["success"], long["errors"][0]["code"]) == (False, 5021)
    assert long["external_reference"] == "too long"
