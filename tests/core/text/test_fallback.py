"""Tools for templates that know none: said in words, and what is said can be read back (B07)."""

from __future__ import annotations

import json

import pytest

from core.errors import TemplateRefused
from core.text.template import ChatTemplate
from core.text.tools.formats import HERMES, PLAIN
from core.text.tools.reader import CallReader, call_ids
from core.types import Message, Tool, ToolCall, ToolChoice
from tests.core.text import templates

WEATHER = Tool(
    name="weather", description="The sky.", parameters='{"type":"object","properties":{"é":{}}}'
)
CLOCK = Tool(name="clock")
USER = Message(role="user", content="Oslo?")
CALLS = (
    ToolCall(id="c1", name="weather", arguments='{"é": "Oslo"}'),
    ToolCall(id="c2", name="clock"),
)
TALK = (
    USER,
    Message(role="assistant", content=None, tool_calls=CALLS),
    Message(role="tool", content="rain", tool_call_id="c1"),
    Message(role="tool", content="noon", tool_call_id="c2"),
)


def shown(
    family: templates.Family,
    *messages: Message,
    tools: tuple[Tool, ...] = (),
    choice: ToolChoice = ToolChoice.AUTO,
    forced: str = "",
) -> str:
    names = {"bos_token": family.begin or "", "eos_token": family.end}
    template = ChatTemplate(family.template, names, {})
    pieces = template.render(
        messages, rendered_at=0, tools=tools, choice=choice, forced_tool=forced
    )
    return "".join(piece.text for piece in pieces)


def test_tools_come_in_a_system_turn_of_their_own() -> None:
    text = shown(templates.CHAT_ML, USER, tools=(WEATHER, CLOCK))
    assert text.startswith("<|im_start|>system\n")
    assert text.index('"weather"') < text.index('"clock"') < text.index("Oslo?")
    line = next(line for line in text.splitlines() if '"weather"' in line)
    assert json.loads(line) == {
        "name": "weather", "description": "The sky.",
        "parameters": {"type": "object", "properties": {"é": {}}},
    }  # fmt: skip


def test_a_system_turn_that_is_there_comes_first() -> None:
    system = Message(role="system", content="Be brief.")
    text = shown(templates.CHAT_ML, system, USER, tools=(CLOCK,))
    assert text.count("<|im_start|>system") == 1
    assert text.index("Be brief.") < text.index('"clock"')


def test_a_template_without_system_turns_has_them_in_the_first_turn() -> None:
    text = shown(templates.GEMMA, USER, tools=(CLOCK,))
    assert text.count("<start_of_turn>") == 2
    assert text.index('"clock"') < text.index("Oslo?")
    with pytest.raises(TemplateRefused, match="System role"):
        shown(templates.GEMMA, Message(role="system", content="x"), USER, tools=(CLOCK,))


@pytest.mark.parametrize(
    ("choice", "forced", "hint"),
    [
        (ToolChoice.AUTO, "", None),
        (ToolChoice.REQUIRED, "", "Call a function now."),
        (ToolChoice.REQUIRED, "clock", "Call the function clock now."),
    ],
)
def test_a_forced_call_is_said_too(choice: ToolChoice, forced: str, hint: str | None) -> None:
    text = shown(templates.CHAT_ML, USER, tools=(CLOCK,), choice=choice, forced=forced)
    assert ("now." in text) is (hint is not None)
    assert hint is None or hint in text


def test_no_tools_no_words() -> None:
    plain = shown(templates.CHAT_ML, USER)
    assert shown(templates.CHAT_ML, USER, tools=(CLOCK,), choice=ToolChoice.NONE) == plain


@pytest.mark.parametrize("family", [templates.CHAT_ML, templates.GEMMA], ids=str)
def test_calls_and_results_are_turns_that_any_template_takes(family: templates.Family) -> None:
    """Strict turns too: two results are one turn of the user's."""
    text = shown(family, *TALK)
    assert "Result of weather: rain\nResult of clock: noon\nAnswer in words." in text
    written = next(line for line in text.splitlines() if line.startswith('{"name": "weather"'))
    reader = CallReader(PLAIN, frozenset({"weather"}), call_ids("r", 0))
    (call,) = reader.push(written, last=True).calls
    assert (call.name, call.arguments) == ("weather", '{"é": "Oslo"}')
    assert '{"name": "clock", "arguments": {}}' in text


def test_results_are_answered_in_words_or_by_another_call() -> None:
    later = Message(role="assistant", content="It rains.")
    assert "Answer in words" not in shown(templates.CHAT_ML, *TALK, later, USER)
    assert "words, or call another" in shown(templates.CHAT_ML, *TALK, tools=(CLOCK,))


def test_a_result_nobody_asked_for_is_still_told() -> None:
    assert "Result: 18" in shown(
        templates.CHAT_ML, USER, Message(role="tool", content="18", tool_call_id="c9")
    )


def test_templates_that_know_tools_keep_their_own_words() -> None:
    text = shown(templates.QWEN, *TALK, tools=(WEATHER,))
    assert "<tool_response>\nrain\n</tool_response>" in text
    assert "To call a function" not in text
    assert ChatTemplate(templates.QWEN.template, {}, {}).form is HERMES
    assert ChatTemplate(templates.CHAT_ML.template, {}, {}).form is PLAIN
    assert ChatTemplate(templates.THINKING.template, {}, {}).form is PLAIN  # is told no tools
