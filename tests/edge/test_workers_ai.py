"""Workers AI's face through a real server: what is asked for and what comes back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec

from core.events import Delta, Event, Finish, ToolCallDelta
from core.types import (
    FinishReason,
    Message,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from edge.api.workers_ai_errors import STATUSES, Envelope
from edge.api.workers_ai_models import FoundModels
from edge.api.workers_ai_types import RunChunk, RunResult
from tests.edge.fakes import (
    END,
    FakeRegion,
    running_edge,
    saying,
    world_of,
)
from tests.edge.workers_ai_face import (
    AI,
    CHAT,
    HI,
    RUN,
    USAGE_OUT,
    WEATHER,
    events_of,
    here,
    refused,
)

CALLED: list[Event] = [
    Delta(
        token_ids=(1,),
        tool_calls=(ToolCallDelta(index=0, id="call_7", name="weather"),),
    ),
    Delta(token_ids=(2,), tool_calls=(ToolCallDelta(index=0, arguments='{"city":'),)),
    Delta(token_ids=(3,), tool_calls=(ToolCallDelta(index=0, arguments='\n "Rom"}'),)),
    Delta(token_ids=(4,), tool_calls=(ToolCallDelta(index=1, id="call_8", name="weather"),)),
    Finish(reason=FinishReason.TOOL_CALLS),
    END[1],
]


async def test_a_whole_answer_and_its_defaults(tmp_path: Path) -> None:
    async with here(tmp_path) as (edge, eu):
        answer = await edge.http.post(RUN, json={"messages": HI})
        assert answer.json() == {
            "result": {"response": "Hello there!", "finish_reason": "stop", "usage": USAGE_OUT},
            "success": True,
            "errors": [],
            "messages": [],
        }
        assert answer.headers["x-skerry-region"] == "eu"
        [asked] = eu.requests
        assert asked.model == "tiny"
        sampling = asked.sampling
        assert (sampling.max_tokens, sampling.max_tokens_yields) == (256, True)
        assert sampling.temperature == 0.6
        assert not asked.reject_if_busy


async def test_the_native_stream(tmp_path: Path) -> None:
    """Usage and reason come once, in the last event before [DONE]."""
    async with here(tmp_path) as (edge, _):
        answer = await edge.http.post(RUN, json={"messages": HI, "stream": True})
        assert events_of(answer) == [
            {"response": "Hello"},
            {"response": " there"},
            {"response": "!"},
            {"response": "", "finish_reason": "stop", "usage": USAGE_OUT},
            "[DONE]",
        ]


async def test_joined_pieces_are_the_answer(tmp_path: Path) -> None:
    """B01: whatever the tokens a step, the stream is the one-shot answer."""
    text = "Žluťoučký kůň 🦙 said “hi”\n\n"
    async with here(tmp_path) as (edge, eu):
        for size in (1, 2, 3, 7, 100):
            eu.script = saying(*(text[i : i + size] for i in range(0, len(text), size)))
            one = (await edge.http.post(RUN, json={"prompt": "x"})).json()["result"]["response"]
            answer = await edge.http.post(RUN, json={"prompt": "x", "stream": True})
            assert "".join(e["response"] for e in events_of(answer)[:-1]) == one == text


async def test_every_way_to_say_what_is_asked(tmp_path: Path) -> None:
    chat = (Message(role="user", content="Hi"),)
    ways: list[tuple[dict[str, object], tuple[Message, ...], str | None]] = [
        ({"messages": HI}, chat, None),
        ({"prompt": "Hi"}, chat, None),
        ({"input": "Hi"}, chat, None),
        ({"input": HI}, chat, None),
        ({"prompt": "Hi", "raw": True}, (), "Hi"),
        ({"prompt": "Hi", "raw": False, "messages": None, "stop": None, "tools": []}, chat, None),
    ]
    async with here(tmp_path) as (edge, eu):
        for body, messages, prompt in ways:
            assert (await edge.http.post(RUN, json=body)).status_code == 200, body
            assert (eu.requests[-1].messages, eu.requests[-1].prompt) == (messages, prompt), body


async def test_every_field_arrives(tmp_path: Path) -> None:
    body = {
        "prompt": "x", "raw": True, "max_tokens": 9, "temperature": 5, "top_p": 0.001,
        "top_k": 50, "seed": 9999999999, "repetition_penalty": 1.5, "frequency_penalty": -2,
        "presence_penalty": 2, "stop": ["a", "b"], "logit_bias": {"7": -3},
        "options": {"rejectIfBusy": True}, "prompt_cache_key": "p", "user": "u", "metadata": {},
    }  # fmt: skip
    async with here(tmp_path) as (edge, eu):
        assert (await edge.http.post(RUN, json=body)).status_code == 200
        asked = eu.requests[-1]
        assert asked.seed == 9999999999
        assert asked.reject_if_busy
        told = asked.sampling
        assert (told.max_tokens, told.max_tokens_yields, told.temperature) == (9, False, 5)
        assert (told.top_p, told.top_k, told.repetition_penalty) == (0.001, 50, 1.5)
        assert (told.frequency_penalty, told.presence_penalty) == (-2, 2)
        assert (told.stop, told.logit_bias) == (("a", "b"), ((7, -3.0),))
        again = {"messages": HI, "max_tokens": 3, "max_completion_tokens": 4}
        await edge.http.post(RUN, json=again)
        assert eu.requests[-1].sampling.max_tokens == 4


async def test_model_names_percent_encoded_or_not(tmp_path: Path) -> None:
    async with here(tmp_path) as (edge, eu):
        for name in (
            "@cf/acme/tiny", "%40cf/acme/tiny", "%40cf%2Facme%2Ftiny", "@cf%2facme/tiny",
            "tiny", "default",
        ):  # fmt: skip
            answer = await edge.http.post(f"{AI}/run/{name}", json={"prompt": "x"})
            assert answer.status_code == 200, (name, answer.text)
            assert eu.requests[-1].model == "tiny"


async def test_tools_in_either_form_and_history(tmp_path: Path) -> None:
    async with here(tmp_path) as (edge, eu):
        forms = [
            WEATHER,
            {"type": "function", "function": WEATHER},
            {"type": "function", **WEATHER},
        ]
        for form in forms:
            body = {"messages": HI, "tools": [form], "tool_choice": "required"}
            assert (await edge.http.post(RUN, json=body)).status_code == 200
            parameters = '{"type":"object","properties":{"zip":{},"city":{"type":"string"}}}'
            assert eu.requests[-1].tools == (
                Tool(name="weather", description="of a city", parameters=parameters),
            )
            assert eu.requests[-1].tool_choice is ToolChoice.REQUIRED
        turns = [
            *HI,
            {"role": "assistant", "content": "", "tool_calls": [
                {"name": "weather", "arguments": {"city": "Rom"}, "id": "call_7"}]},
            {"role": "tool", "content": "sunny", "tool_call_id": "call_7", "name": "weather"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{ }"}}]},
            {"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "c2"},
        ]  # fmt: skip
        assert (await edge.http.post(RUN, json={"messages": turns})).status_code == 200
        said = eu.requests[-1].messages
        assert said[1].tool_calls == (
            ToolCall(id="call_7", name="weather", arguments='{"city":"Rom"}'),
        )
        assert said[3].tool_calls == (ToolCall(id="c2", name="f", arguments="{ }"),)
        assert [one.tool_call_id for one in said] == [None, None, "call_7", None, "c2"]


async def test_native_tool_calls(tmp_path: Path) -> None:
    """Arguments are objects, ids are the engine's, and the reason is the same in both forms."""
    calls = [
        {"index": 0, "id": "call_7", "name": "weather", "arguments": {"city": "Rom"}},
        {"index": 1, "id": "call_8", "name": "weather", "arguments": {}},
    ]
    async with here(tmp_path, script=lambda _: CALLED) as (edge, _):
        body = {"messages": HI, "tools": [WEATHER]}
        result = (await edge.http.post(RUN, json=body)).json()["result"]
        assert result == {
            "response": "", "tool_calls": calls, "finish_reason": "tool_calls", "usage": USAGE_OUT,
        }  # fmt: skip
        events = events_of(await edge.http.post(RUN, json={**body, "stream": True}))
        assert events == [
            {"response": "", "tool_calls": calls},
            {"response": "", "finish_reason": "tool_calls", "usage": USAGE_OUT},
            "[DONE]",
        ]


async def test_a_call_that_the_limit_cut_is_left_out(tmp_path: Path) -> None:
    cut: list[Event] = [*CALLED[:2], Finish(reason=FinishReason.LENGTH), END[1]]
    async with here(tmp_path, script=lambda _: cut) as (edge, _):
        body = {"messages": HI, "tools": [WEATHER]}
        result = (await edge.http.post(RUN, json=body)).json()["result"]
        assert result == {"response": "", "finish_reason": "length", "usage": USAGE_OUT}
        events = events_of(await edge.http.post(RUN, json={**body, "stream": True}))
        assert [set(one) for one in events[:-1]] == [{"response", "finish_reason", "usage"}]


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{}}}'


async def test_json_mode(tmp_path: Path) -> None:
    forms: list[tuple[object, ResponseFormat]] = [
        ({"type": "json_object"}, ResponseFormat()),
        (
            {"type": "json_schema", "json_schema": SCHEMA},
            ResponseFormat(schema=SCHEMA_TEXT, param="response_format.json_schema"),
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            ResponseFormat(schema=SCHEMA_TEXT, param="response_format.json_schema.schema"),
        ),
    ]
    async with here(tmp_path, script=saying(' {"b": 1, ', '"a": [2.50]}\n')) as (edge, eu):
        for form, inner in forms:
            body = {"messages": HI, "response_format": form}
            answer = await edge.http.post(RUN, json=body)
            assert eu.requests[-1].response_format == inner
            assert answer.json()["result"]["response"] == {"b": 1, "a": [2.5]}
            assert list(answer.json()["result"]["response"]) == ["b", "a"]
        text = {"messages": HI, "response_format": {"type": "text"}}
        assert (await edge.http.post(RUN, json=text)).json()["result"]["response"][:2] == " {"


async def test_the_twins_speak_openai_with_256_tokens(tmp_path: Path) -> None:
    async with here(tmp_path) as (edge, eu):
        answer = await edge.http.post(CHAT, json={"model": "@cf/acme/tiny", "messages": HI})
        assert answer.json()["choices"][0]["message"]["content"] == "Hello there!"
        assert answer.json()["model"] == "@cf/acme/tiny"
        assert eu.requests[-1].sampling.max_tokens == 256
        assert eu.requests[-1].sampling.temperature == 1
        text = await edge.http.post(f"{AI}/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert text.json()["choices"][0]["text"] == "Hello there!"
        assert eu.requests[-1].sampling.max_tokens == 256
        bad = await edge.http.post(CHAT, json={"model": "@cf/no/no", "messages": HI})
        assert (bad.status_code, bad.json()["error"]["code"]) == (404, "model_not_found")
        odd = {"model": "tiny", "messages": HI, "options": {"gateway": {"id": "g"}}}
        refusal = await edge.http.post(CHAT, json=odd)
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "options.gateway")


async def test_affinity_by_header_or_field(tmp_path: Path) -> None:
    eu, us = FakeRegion("eu"), FakeRegion("us")
    async with eu.serving(), us.serving(), running_edge(world_of(tmp_path, eu, us)) as edge:
        for name in ("ses_1", "ses_2", "ses_3"):
            headers = {"x-session-affinity": name}
            one = await edge.http.post(RUN, json={"prompt": "a"}, headers=headers)
            two = await edge.http.post(RUN, json={"prompt": "b"}, headers=headers)
            three = await edge.http.post(RUN, json={"prompt": "c", "prompt_cache_key": name})
            regions = {one.headers["x-skerry-region"] for one in (one, two, three)}
            assert len(regions) == 1
            assert one.headers["x-skerry-route"] == "affinity"


async def test_models_search(tmp_path: Path) -> None:
    async with here(tmp_path) as (edge, _):

        async def names(query: str) -> list[str]:
            answer = await edge.http.get(f"{AI}/models/search{query}")
            assert answer.status_code == 200, answer.text
            body = answer.json()
            assert body["success"] is True
            assert body["result_info"]["count"] == len(body["result"])
            return [one["name"] for one in body["result"]]

        found = ["@cf/acme/tiny"]
        for query in (
            "", "?search=TIN", "?author=acme", "?task=Text%20Generation", "?source=1",
            "?hide_experimental=true", "?page=1&per_page=1",
        ):  # fmt: skip
            assert await names(query) == found, query
        for query in ("?search=zzz", "?author=acm", "?task=Translation", "?source=2", "?page=2"):
            assert await names(query) == [], query
        for query, word in (
            ("?sarch=x", "search"), ("?page=0", "page"), ("?per_page=1001", "per_page"),
            ("?per_page=x", "per_page"), ("?hide_experimental=2", "hide_experimental"),
        ):  # fmt: skip
            assert refused(await edge.http.get(f"{AI}/models/search{query}"), 400, 8001, word)
        [model] = (await edge.http.get(f"{AI}/models/search")).json()["result"]
        assert model["task"]["name"] == "Text Generation"
        assert {"property_id": "context_window", "value": "512"} in model["properties"]


async def test_answers_are_what_the_document_says(tmp_path: Path) -> None:
    async with here(tmp_path) as (edge, _):
        document = (await edge.http.get("/openapi.json")).json()
        whole = (await edge.http.post(RUN, json={"messages": HI})).content
        found = (await edge.http.get(f"{AI}/models/search")).content
        events = events_of(await edge.http.post(RUN, json={"prompt": "x", "stream": True}))
    prefix = "/client/v4/accounts/{account}/ai"
    paths = {path.removeprefix(prefix): one for path, one in document["paths"].items()}
    assert {"/run/{model}", "/v1/chat/completions", "/v1/completions", "/models/search"} <= set(
        paths
    )
    told = paths["/run/{model}"]["post"]["responses"]
    assert {str(status) for status in STATUSES.values()} <= set(told)
    refs = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert refs <= set(document["components"]["schemas"])
    assert msgspec.json.decode(whole, type=Envelope[RunResult]).result.response == "Hello there!"
    assert msgspec.json.decode(found, type=FoundModels).result[0].name == "@cf/acme/tiny"
    assert [msgspec.convert(one, RunChunk).response for one in events[:-1]][:2] == [
        "Hello", " there",
    ]  # fmt: skip
