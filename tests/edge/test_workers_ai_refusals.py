"""Workers AI's face through a real server: what is refused, how, and with which code."""

from __future__ import annotations

from pathlib import Path

from core.errors import BY_CODE, NoCapacity, QuotaExceeded
from edge.api.workers_ai_errors import STATUSES
from tests.edge.fakes import (
    Cut,
    FakeRegion,
    Script,
    delta,
    fault,
    running_edge,
    saying,
    world_of,
)
from tests.edge.workers_ai_face import (
    AI,
    CHAT,
    HI,
    RUN,
    WEATHER,
    events_of,
    here,
    refused,
)

BAD: dict[str, tuple[dict[str, object], int, str]] = {
    "empty": ({}, 3003, "prompt"),
    "neither": ({"max_tokens": 3}, 3003, "messages"),
    "null": ({"prompt": None}, 3003, "prompt"),
    "both": ({"prompt": "x", "messages": HI}, 8001, "messages"),
    "no-messages": ({"messages": []}, 8001, "messages"),
    "number": ({"prompt": 5}, 8001, "prompt"),
    "empty-prompt": ({"prompt": ""}, 8001, "prompt"),
    "empty-input": ({"input": ""}, 8001, "input"),
    "raw-messages": ({"messages": HI, "raw": True}, 8001, "raw"),
    "raw-tools": ({"prompt": "x", "raw": True, "tools": [WEATHER]}, 8001, "tools"),
    "raw-json": (
        {"prompt": "x", "raw": True, "response_format": {"type": "json_object"}},
        8001,
        "response_format",
    ),
    "hot": ({"prompt": "x", "temperature": 5.1}, 8001, "temperature"),
    "top-p": ({"prompt": "x", "top_p": 0}, 8001, "top_p"),
    "top-k-0": ({"prompt": "x", "top_k": 0}, 8001, "top_k"),
    "top-k-51": ({"prompt": "x", "top_k": 51}, 8001, "top_k"),
    "seed-0": ({"prompt": "x", "seed": 0}, 8001, "seed"),
    "seed-big": ({"prompt": "x", "seed": 10**10}, 8001, "seed"),
    "repetition": ({"prompt": "x", "repetition_penalty": 0}, 8001, "repetition_penalty"),
    "limit": ({"prompt": "x", "max_tokens": 0}, 8001, "max_tokens"),
    "stream-json": (
        {"prompt": "x", "stream": True, "response_format": {"type": "json_object"}},
        8001,
        "stream",
    ),
    "format": ({"prompt": "x", "response_format": {"type": "yaml"}}, 8001, "response_format"),
    "schema": (
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": "no"}},
        8001,
        "json_schema",
    ),
    "no-schema": ({"prompt": "x", "response_format": {"type": "json_schema"}}, 8001, "json_schema"),
    "lora": ({"prompt": "x", "lora": "mine"}, 5005, "lora"),
    "functions": ({"prompt": "x", "functions": [{}]}, 8001, "functions"),
    "two": ({"prompt": "x", "n": 2}, 8001, "v1/chat/completions"),
    "logprobs": ({"prompt": "x", "logprobs": True}, 8001, "logprobs"),
    "effort": ({"prompt": "x", "reasoning_effort": "low"}, 8001, "reasoning_effort"),
    "template": ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, 8001, "chat_template_kwargs"),
    "gateway": ({"prompt": "x", "options": {"gateway": {"id": "g"}}}, 8001, "options.gateway"),
    "headers": (
        {"prompt": "x", "options": {"extraHeaders": {"a": "b"}}},
        8001,
        "options.extraHeaders",
    ),
    "option": ({"prompt": "x", "options": {"rejectIfBuzy": True}}, 8001, "rejectIfBusy"),
    "in-inputs": ({"prompt": "x", "rejectIfBusy": True}, 8001, "rejectIfBusy"),
    "unknown": ({"prompt": "x", "max_token": 1}, 8001, "max_tokens"),
    "queue": ({"requests": [{"prompt": "x"}]}, 3003, "prompt"),
    "queue-and": ({"prompt": "x", "requests": []}, 8001, "queueRequest=true"),
    "poll": ({"prompt": "x", "request_id": "r"}, 8001, "queueRequest=true"),
    "tool-name": ({"prompt": "x", "tools": [{"name": "a b"}]}, 8001, "tools[0]"),
    "tool-text": ({"prompt": "x", "tools": ["f"]}, 8001, "tools[0]"),
    "tool-any": ({"prompt": "x", "tools": [WEATHER], "tool_choice": "any"}, 8001, "tool_choice"),
    "call": (
        {"messages": [{"role": "assistant", "tool_calls": [{"arguments": {}}]}]},
        8001,
        "messages[0].tool_calls[0].name",
    ),
}


async def test_refused_by_name(tmp_path: Path) -> None:
    async with here(tmp_path) as (edge, eu):
        for name, (body, code, word) in BAD.items():
            streamed = [] if "response_format" in body else [{**body, "stream": True}]
            for sent in (body, *streamed):
                answer = await edge.http.post(RUN, json=sent)
                assert answer.status_code == (405 if code == 5005 else 400), (name, answer.text)
                assert refused(answer, answer.status_code, code, word)
        assert eu.requests == []


MALFORMED = (
    b"", b" ", b"{", b"[]", b"null", b"[" * 20_000, b'{"prompt": NaN}', b"\xff", b"{} {}",
)  # fmt: skip


async def test_malformed(tmp_path: Path) -> None:  # B11, B28
    async with here(tmp_path) as (edge, _):
        for raw in MALFORMED:
            answer = await edge.http.post(RUN, content=raw)
            assert refused(answer, 400, 8001 if raw.strip() else 3003)
            assert (await edge.http.post(RUN, json={"prompt": "x"})).status_code == 200


async def test_model_names_that_are_none(tmp_path: Path) -> None:
    names = {
        "@cf/acme/tiny2": 5007, "tiny2": 5007,
        "tiny with spaces": 3042, "%00": 3042, "x" * 300: 3042, "$HOME": 3042,
    }  # fmt: skip
    async with here(tmp_path) as (edge, _):
        for name, code in names.items():
            answer = await edge.http.post(f"{AI}/run/{name}", json={"prompt": "x"})
            assert refused(answer, STATUSES[code], code)
        inputs = {"text": ["those of an embedding"]}
        answer = await edge.http.post(f"{AI}/run/@cf/baai/bge-m3", json=inputs)
        assert refused(answer, STATUSES[5007], 5007, "'@cf/baai/bge-m3' does not exist")


async def test_json_mode_that_is_not_met(tmp_path: Path) -> None:
    async with here(tmp_path) as (edge, eu):
        for said in ("", '{"b": ', "no JSON", "[" * 5000):
            eu.script = saying(said)
            body = {"messages": HI, "response_format": {"type": "json_object"}}
            assert refused(
                await edge.http.post(RUN, json=body), 400, 5024, "JSON Mode couldn't be met"
            )


async def test_every_failure_has_its_code_and_status(tmp_path: Path) -> None:
    """3036 is never 3040: which one it is tells a client how long to wait."""
    eu = FakeRegion("eu")
    async with (
        eu.serving(),
        running_edge(world_of(tmp_path, eu, limits="hold = 0")) as edge,
    ):
        for code, kind in BY_CODE.items():
            if code == "cancelled":
                continue  # whoever cancelled is not told
            eu.script = saying_fault(code)
            answer = await edge.http.post(RUN, json={"prompt": "x"})
            status = STATUSES.get(kind.cloudflare_code, kind.http_status)
            assert refused(answer, status, kind.cloudflare_code, "it failed")
            if status == 429 and kind in (NoCapacity, QuotaExceeded):
                assert answer.headers["retry-after"] == "8"
            if kind is NoCapacity:
                assert refused(
                    answer, 429, 3040, "Capacity temporarily exceeded, please try again."
                )
        assert (NoCapacity.cloudflare_code, QuotaExceeded.cloudflare_code) == (3040, 3036)


def saying_fault(code: str) -> Script:
    return lambda _: [fault(code, "it failed", param="prompt", retry_after_s=7.2)]


async def test_a_stream_that_breaks_says_so_in_the_envelope(tmp_path: Path) -> None:
    async with here(tmp_path, script=lambda _: [delta("a"), Cut()]) as (edge, _):
        events = events_of(await edge.http.post(RUN, json={"prompt": "x", "stream": True}))
        assert events[0] == {"response": "a"}
        assert events[-1]["success"] is False
        assert events[-1]["errors"][0]["code"] == 3040
        assert len(events) == 2


async def test_busy_is_said_at_once_where_asked_for(tmp_path: Path) -> None:
    script = lambda _: [fault("no_capacity", retry_after_s=3.0)]  # noqa: E731
    async with here(tmp_path, script=script) as (edge, _):
        for path, body in (
            (RUN, {"prompt": "x"}),
            (RUN, {"prompt": "x", "stream": True}),
            (CHAT, {"model": "tiny", "messages": HI}),
        ):
            asked = {**body, "options": {"rejectIfBusy": True}}
            answer = await edge.http.post(path, json=asked)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "3"


async def test_gateway_headers(tmp_path: Path) -> None:
    neutral = ({"cf-aig-skip-cache": "true"}, {"cf-aig-collect-log": "false"})
    meant = (
        {"cf-aig-cache-ttl": "60"}, {"cf-aig-skip-cache": "false"}, {"cf-aig-max-attempts": "3"},
    )  # fmt: skip
    async with here(tmp_path) as (edge, _):
        for headers in neutral:
            answer = await edge.http.post(RUN, json={"prompt": "x"}, headers=headers)
            assert answer.status_code == 200
        for headers in meant:
            answer = await edge.http.post(RUN, json={"prompt": "x"}, headers=headers)
            assert refused(answer, 400, 8001, next(iter(headers)))


async def test_paths_and_queries_that_are_none(tmp_path: Path) -> None:
    async with here(tmp_path) as (edge, _):
        assert refused(await edge.http.get(f"{AI}/nothing"), 404, 7003)
        assert refused(await edge.http.get(RUN), 405, 7001)
        assert refused(
            await edge.http.post(f"{RUN}?wait=1", json={"prompt": "x"}), 400, 8001, "wait"
        )
        odd = await edge.http.post(f"{RUN}?queueRequest=maybe", json={"prompt": "x"})
        assert refused(odd, 400, 8001, "queueRequest")
