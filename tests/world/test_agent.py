"""Schemas and tools on the bundled model, through two edges, routers, prefill and decode nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from deploy.launcher import LocalWorld
from tests.world.scripted import Answer, ask
from tests.world.test_real_model import CHAT, HANDBOOK, chat

pytestmark = [pytest.mark.world, pytest.mark.model]

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": PARAMETERS,
    },
}
WORDS = {"type": "array", "items": {"enum": ["boat", "cook", "é"]}, "minItems": 2, "maxItems": 3}
LIST = {
    "type": "object",
    "properties": {"rule": {"type": "integer", "minimum": 1, "maximum": 60}, "words": WORDS},
    "required": ["rule", "words"],
    "additionalProperties": False,
}


@pytest.fixture
def client(real: LocalWorld) -> Iterator[openai.OpenAI]:
    base = real.edges["ams"] + "/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=200) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_an_agent_asks_for_a_tool_gets_its_result_and_answers(
    client: openai.OpenAI, streamed: bool
) -> None:
    talk: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "What is the weather in Paris?"}
    ]

    def say(limit: int, choice: str) -> Any:  # the two ways have types of their own
        more: Any = {"tools": [WEATHER], "tool_choice": choice, "temperature": 0}
        if not streamed:
            return client.chat.completions.create(
                model="smollm2", messages=talk, max_tokens=limit, **more
            )
        with client.chat.completions.stream(
            model="smollm2", messages=talk, max_tokens=limit, **more
        ) as stream:
            return stream.get_final_completion()

    asked = say(80, "required").choices[0]
    assert asked.finish_reason == "tool_calls"
    (call,) = asked.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    assert not asked.message.content

    talk.append(cast("ChatCompletionMessageParam", asked.message.model_dump()))
    talk.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny, 18 degrees"})
    answer = say(400, "none").choices[0]
    assert answer.finish_reason == "stop"
    assert "18" in (answer.message.content or "")
    assert not answer.message.tool_calls


def form(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}


def cold_and_split(
    real: LocalWorld,
) -> tuple[dict[str, object], dict[str, object], Answer]:
    """A handbook of its own, which nobody may have read before, a question about it, and the answer
    of a region that found that it pays to read it at another node."""
    for number in range(6):
        handbook: dict[str, object] = {
            "role": "system",
            "content": f"For crew {number}. {HANDBOOK}",
        }
        turns = [handbook, {"role": "user", "content": "Which rule names the cook? As JSON."}]
        body = chat(
            "", messages=turns, response_format=form(LIST), seed=3, temperature=1.3, max_tokens=60
        )
        cold = ask(real.edges["nyc"], body, CHAT)
        if cold.facts["kv_bytes"]:
            return handbook, body, cold
    raise AssertionError("no prompt was read by another node")


def test_a_schema_holds_split_cached_and_in_company(real: LocalWorld) -> None:
    handbook, body, cold = cold_and_split(real)
    boats = [handbook, {"role": "user", "content": "Tell me of boats."}]
    others = [chat("", messages=boats, temperature=1.0, seed=n) for n in range(3)]
    more = [{**body, "seed": n} for n in range(2)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda b: ask(real.edges["ams"], b, CHAT), [body, *others, *more]))
    assert answers[0].text == cold.text
    for answer in (cold, answers[0], *answers[4:]):
        assert answer.finish == "stop", answer.error
        jsonschema.validate(json.loads(answer.text), LIST)


def test_choices_of_one_prompt_each_keep_the_schema(client: openai.OpenAI) -> None:
    more: Any = {"response_format": form(LIST)}
    answer = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "JSON of boats."}], n=3, seed=1,
        temperature=1.5, max_tokens=60, logprobs=True, **more,
    )  # fmt: skip
    texts = [choice.message.content or "" for choice in answer.choices]
    assert len(set(texts)) > 1
    for choice, text in zip(answer.choices, texts, strict=True):
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(text), LIST)
        assert choice.logprobs is not None
        spelled = bytes(b for one in choice.logprobs.content or [] for b in one.bytes or [])
        assert spelled.decode() == text


def test_a_schema_that_cannot_be_kept_is_refused_before_any_byte(real: LocalWorld) -> None:
    bad = {"type": "array", "uniqueItems": True}
    refused = ask(real.edges["nyc"], chat("JSON, please.", response_format=form(bad)), CHAT)
    assert refused.status == 400
    assert refused.error is not None
    assert refused.error["param"] == "response_format.json_schema.schema"
    assert "'uniqueItems'" in refused.error["message"]
