"""The native form from token ids, by way of the node's answer: whatever falls into one engine
step, a client joins the same text and the same calls (B01, B06, B28)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.events import Delta, Done, Event, Finish
from core.text.model import TextModel, load_text
from core.types import FinishReason, Usage
from edge.api.workers_ai_render import RunRenderer
from tests.edge.test_tool_stream import ARGUMENTS, STEPS, TEMPLATE, asked, events_of, ids_of
from tests.tiny_text import write_tiny_folder

USAGE = Usage(prompt_tokens=1, completion_tokens=1)
PLAIN = "ďábel 👩‍👩‍👧‍👦 天气\n\ndata: [DONE]\r\n 🦙 é"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text(write_tiny_folder(tmp_path_factory.mktemp("t") / "tiny", template=TEMPLATE))


def streamed(steps: list[list[Event]]) -> list[dict[str, Any]]:
    render = RunRenderer(json_mode=False)
    data = b"".join(render.stream(_shown(events)) for events in steps)
    events = data.split(b"\n\n")
    assert events.pop() == b""
    assert all(one.startswith(b"data: {") and b"\n" not in one for one in events)
    return [json.loads(one.removeprefix(b"data: ")) for one in events]


def whole(steps: list[list[Event]]) -> Any:
    render = RunRenderer(json_mode=False)
    for events in steps:
        render.take(_shown(events))
    return json.loads(render.whole(USAGE))["result"]


def _shown(events: list[Event]) -> list[Delta | Finish | Done]:
    return [one for one in events if isinstance(one, Delta | Finish | Done)]


@pytest.mark.parametrize("step", STEPS)
def test_text_at_any_step(text: TextModel, step: int) -> None:
    steps = events_of(text, asked(tools=()), ids_of(text, PLAIN), step)
    result = whole(steps)
    assert (result["response"], result["finish_reason"]) == (PLAIN, "stop")
    events = streamed(steps)
    assert "".join(one["response"] for one in events) == PLAIN
    assert [set(one) for one in events[:-1]] == [{"response"}] * (len(events) - 1)
    assert set(events[-1]) == {"response", "finish_reason", "usage"}


@pytest.mark.parametrize("step", STEPS)
def test_calls_at_any_step(text: TextModel, step: int) -> None:
    steps = events_of(text, asked(), ids_of(text), step)
    result, events = whole(steps), streamed(steps)
    assert result["finish_reason"] == events[-1]["finish_reason"] == "tool_calls"
    calls = [call for one in events for call in one.get("tool_calls", ())]
    assert calls == result["tool_calls"]
    assert [(one["index"], one["name"], one["arguments"]) for one in calls] == [
        (0, "weather", json.loads(ARGUMENTS)),
        (1, "clock", {}),
    ]
    assert len({one["id"] for one in calls}) == 2
    assert "".join(one["response"] for one in events) == result["response"]


def test_a_call_cut_anywhere_is_whole_or_absent(text: TextModel) -> None:
    ids = ids_of(text)
    seen: set[int] = set()
    for cut in range(1, len(ids), 3):
        steps = events_of(text, asked(), ids[:cut], 5, finish=FinishReason.LENGTH)
        result, events = whole(steps), streamed(steps)
        calls = result.get("tool_calls", [])
        assert [call for one in events for call in one.get("tool_calls", ())] == calls
        assert [one["arguments"] for one in calls] == [json.loads(ARGUMENTS), {}][: len(calls)]
        assert result["finish_reason"] == events[-1]["finish_reason"]
        seen.add(len(calls))
    assert seen >= {0, 1}
