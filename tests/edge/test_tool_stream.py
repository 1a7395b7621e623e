"""Calls from token ids to the official client, by way of the node's answer and the edge's renderer:
whatever falls into one engine step, the client joins the same calls (B06)."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from core.engine.messages import SequenceSpec, TokenOutput
from core.engine.plan import SequenceId
from core.events import Delta, Done, Event, Finish, event_decoder
from core.text.model import TextModel, load_text
from core.types import (
    FinishReason,
    GenerateRequest,
    ModelName,
    RequestId,
    ResumePoint,
    Sampling,
    Tool,
    Usage,
)
from edge.api.openai_render import ChatRenderer
from regional.node.answer import Answer
from tests.tiny_text import CHATML, IM_END_ID, write_tiny_folder

TEMPLATE = (
    "{# calls stand in <tool_call> marks #}{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
)
ARGUMENTS = json.dumps(
    {"q": 'a "b", {c}', "emoji": "👩‍👩‍👧‍👦 ďábel", "more": {}}, ensure_ascii=False
)
SAID = (
    "I will look it up.\n"
    f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
STEPS = [1, 2, 3, 7, 10_000]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text(write_tiny_folder(tmp_path_factory.mktemp("t") / "tiny", template=TEMPLATE))


def asked(**more: object) -> GenerateRequest:
    request = GenerateRequest(
        id=RequestId("r"), model=ModelName("m"), seed=1, rendered_at=0,
        tools=(Tool(name="weather"), Tool(name="clock")),
    )  # fmt: skip
    return msgspec.structs.replace(request, **more)


def ids_of(text: TextModel, said: str = SAID) -> tuple[int, ...]:
    return (*text.encode_prompt(said), IM_END_ID)


def events_of(
    text: TextModel,
    request: GenerateRequest,
    ids: Sequence[int],
    step: int,
    *,
    resumed: tuple[int, ...] = (),
    finish: FinishReason | None = FinishReason.STOP,
) -> list[list[Event]]:
    """The events of each step; `resumed`: ids that were generated in an earlier life."""
    spec = SequenceSpec(
        token_ids=(1, 2), output_ids=resumed, max_tokens=1000, stop_ids=text.end_ids
    )
    answer = Answer(request, [spec], text, placed_at=0.0)
    decoder = event_decoder()
    steps: list[list[Event]] = []
    for start in range(0, len(ids), step):
        part = tuple(ids[start : start + step])
        output = TokenOutput(
            sequence=SequenceId("s"),
            token_ids=part,
            finish=finish if start + step >= len(ids) else None,
        )
        steps.append(list(decoder.feed(answer.absorb(0, output, now=0.0).frames)))
    return steps


def renderer() -> ChatRenderer:
    return ChatRenderer(request_id="r", model="m", created=1, include_usage=False)


def streamed(steps: Sequence[Sequence[Event]]) -> ChatCompletion:
    """What the official client puts together of the stream."""
    state, render = ChatCompletionStreamState(), renderer()
    for events in steps:
        shown = [one for one in events if isinstance(one, Delta | Finish | Done)]
        for event in render.stream(shown).split(b"\n\n"):
            if event:
                state.handle_chunk(
                    ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: "))
                )
    return ChatCompletion.model_validate(state.current_completion_snapshot.model_dump())


def whole(steps: Sequence[Sequence[Event]]) -> ChatCompletion:
    render = renderer()
    for events in steps:
        render.take([one for one in events if isinstance(one, Delta | Finish)])
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    return ChatCompletion.model_validate_json(render.whole(usage))


def calls_of(answer: ChatCompletion) -> list[tuple[str, str, str]]:
    found = []
    for call in answer.choices[0].message.tool_calls or []:
        assert call.type == "function"
        found.append((call.id, call.function.name, call.function.arguments))
    return found


@pytest.mark.parametrize("step", STEPS)
def test_the_official_client_joins_the_same_calls(text: TextModel, step: int) -> None:
    steps = events_of(text, asked(), ids_of(text), step)
    one, other = streamed(steps), whole(steps)
    assert [(name, given) for _, name, given in calls_of(one)] == [
        ("weather", ARGUMENTS), ("clock", "{}"),
    ]  # fmt: skip
    assert calls_of(one) == calls_of(other)
    assert len({call for call, _, _ in calls_of(one)}) == 2
    for answer in (one, other):
        assert answer.choices[0].message.content == "I will look it up."
        assert answer.choices[0].finish_reason == "tool_calls"
    given = [token for step in steps for e in step if isinstance(e, Delta) for token in e.token_ids]
    assert tuple(given) == ids_of(text)


@pytest.mark.parametrize("step", STEPS)
def test_an_answer_of_calls_alone_has_no_content(text: TextModel, step: int) -> None:
    ids = ids_of(text, SAID[SAID.index("<tool_call>") :])
    answer = whole(events_of(text, asked(), ids, step))
    assert answer.choices[0].message.content is None
    assert len(calls_of(answer)) == 2


@pytest.mark.parametrize("step", [1, 7])
def test_a_cut_call_says_length_and_shows_what_there_is(text: TextModel, step: int) -> None:
    ids = text.encode_prompt(SAID[: SAID.index("emoji")])
    answer = streamed(events_of(text, asked(), ids, step, finish=FinishReason.LENGTH))
    assert answer.choices[0].finish_reason == "length"
    ((_, name, arguments),) = calls_of(answer)
    assert name == "weather"
    assert ARGUMENTS.startswith(arguments)


def test_without_tools_the_same_text_is_text(text: TextModel) -> None:
    answer = whole(events_of(text, asked(tools=()), ids_of(text), 3))
    assert (answer.choices[0].message.content, calls_of(answer)) == (SAID, [])
    assert answer.choices[0].finish_reason == "stop"


def test_a_stop_string_ends_the_answer_before_a_call_is_read(text: TextModel) -> None:
    request = asked(sampling=Sampling(stop=("look it",)))
    answer = whole(events_of(text, request, ids_of(text), 3))
    assert (answer.choices[0].message.content, calls_of(answer)) == ("I will ", [])


def test_a_continued_answer_says_nothing_twice(text: TextModel) -> None:
    """B22: cut anywhere, what was sent and what follows are the whole."""
    ids = ids_of(text)
    full = [one for step in events_of(text, asked(), ids, 1) for one in step]
    for cut in range(1, len(ids), 5):
        before = events_of(text, asked(), ids[:cut], 1, finish=None)
        sent = [one for step in before for one in step]
        writer = text.writer((), text.end_ids)
        raw = "".join(writer.push((one,), None).text for one in ids[:cut])
        point = ResumePoint(choice=0, token_ids=ids[:cut], chars_sent=len(raw))
        rest = events_of(text, asked(resume=(point,)), ids[cut:], 3, resumed=ids[:cut])
        after = [one for step in rest for one in step]
        assert _joined([*sent, *after]) == _joined(full), cut


def _joined(events: Sequence[Event]) -> tuple[str, dict[int, str]]:
    calls: dict[int, str] = {}
    deltas = [one for one in events if isinstance(one, Delta)]
    for piece in (piece for one in deltas for piece in one.tool_calls):
        head = f"{piece.id} {piece.name} " if piece.id else ""
        calls[piece.index] = calls.get(piece.index, "") + head + piece.arguments
    return "".join(one.text for one in deltas), calls
