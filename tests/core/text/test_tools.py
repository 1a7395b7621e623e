"""Calls read out of streamed text: the same whatever the pieces (B06), and text stays text."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.events import ToolCallDelta
from core.text.tools.formats import (
    DEEPSEEK3,
    DEEPSEEK31,
    HERMES,
    LLAMA3,
    PLAIN,
    ToolFormat,
    format_of,
)
from core.text.tools.reader import CallReader, call_ids

NAMES = frozenset({"weather", "clock"})
NASTY = json.dumps(
    {
        "q": 'say "}]," \\ </tool_call>\n',
        "emoji": "👩‍👩‍👧‍👦 é",
        "empty": {},
        "list": [{}, [[]], "{"],
    },
    ensure_ascii=False,
)


@dataclass
class Heard:
    """What a client puts together, by the letter of OpenAI's form."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def take(self, text: str, pieces: tuple[ToolCallDelta, ...]) -> None:
        self.text += text
        assert len({piece.index for piece in pieces}) == len(pieces)
        for piece in pieces:
            if piece.index == len(self.calls):
                assert piece.id
                assert piece.name
                self.ids.append(piece.id)
                self.calls.append((piece.name, piece.arguments))
            else:
                assert piece.index == len(self.calls) - 1
                assert piece.id is None
                assert piece.name is None
                name, arguments = self.calls[piece.index]
                self.calls[piece.index] = (name, arguments + piece.arguments)


def read(form: ToolFormat, text: str, size: int = 1, *, several: bool = True) -> Heard:
    reader = CallReader(form, NAMES, call_ids("r", 0), several=several)
    heard = Heard()
    for start in range(0, len(text), size):
        pieces = reader.push(text[start : start + size])
        heard.take(pieces.text, pieces.calls)
    last = reader.push("", last=True)
    heard.take(last.text, last.calls)
    assert bool(reader.calls) == bool(heard.calls)
    return heard


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deepseek(form: ToolFormat, *calls: tuple[str, str]) -> str:
    texts = (f"{form.opening}{name}{form.named}{text}{form.closing}" for name, text in calls)
    return form.around[0] + form.between.join(texts) + form.around[1]


TALKS: dict[str, tuple[ToolFormat, str, str, list[tuple[str, str]]]] = {
    "two": (
        HERMES, "Let me look.\n" + hermes("weather", NASTY) + "\n" + hermes("clock", "{}"),
        "Let me look.", [("weather", NASTY), ("clock", "{}")],
    ),
    "text-after": (HERMES, hermes("clock", "{}") + "\nDone.", "\nDone.", [("clock", "{}")]),
    "blanks-only": (HERMES, "\n\n" + hermes("clock", "{}") + "\n \n", "", [("clock", "{}")]),
    "no-end-marker": (
        HERMES, hermes("clock", "{}")[:-12] + "\n" + hermes("weather", "{}"), "",
        [("clock", "{}"), ("weather", "{}")],
    ),
    "only-like-a-marker": (HERMES, "a <tool_cal> b <tool_call", "a <tool_cal> b <tool_call", []),
    "marker-without-call": (HERMES, "a <tool_call>\nhello", "a \nhello", []),
    "object-without-name": (
        HERMES, 'x <tool_call>\n{"a": 1}\n</tool_call> y', 'x \n{"a": 1} y', [],
    ),
    "name-last": (
        HERMES, '<tool_call>{"arguments": {"a": [1]}, "name": "clock"}</tool_call>', "",
        [("clock", '{"a": [1]}')],
    ),
    "arguments-as-text": (
        HERMES, '<tool_call>{"name": "clock", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
        [("clock", '{"a": 1}')],
    ),
    "no-arguments": (HERMES, '<tool_call>{"name": "clock"}</tool_call>', "", [("clock", "{}")]),
    "null-arguments": (
        HERMES, '<tool_call>{"name": "clock", "arguments": null}</tool_call>', "",
        [("clock", "{}")],
    ),
    "other-members": (
        HERMES,
        '<tool_call>{"id": 7, "name":"clock" ,"arguments":{"a":{}} , "x": true}</tool_call>',
        "", [("clock", '{"a":{}}')],
    ),
    "cut-in-arguments": (
        HERMES, '<tool_call>{"name": "clock", "arguments": {"a": "b', "", [("clock", '{"a": "b')],
    ),
    "cut-in-name": (HERMES, '<tool_call>\n{"name": "clo', '\n{"name": "clo', []),
    "unknown-name-behind-a-marker": (HERMES, hermes("other", "{}"), "", [("other", "{}")]),
    "llama": (
        LLAMA3,
        '{"name": "weather", "parameters": ' + NASTY + '}; {"name": "clock", "parameters": {}}',
        "", [("weather", NASTY), ("clock", "{}")],
    ),
    "deepseek": (
        DEEPSEEK3,
        "Let me look.\n\n" + deepseek(DEEPSEEK3, ("weather", NASTY), ("clock", "{}")),
        "Let me look.", [("weather", NASTY), ("clock", "{}")],
    ),
    "deepseek-as-it-stands": (
        DEEPSEEK3,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n"
        '{"a": [1]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "", [("clock", '{"a": [1]}')],
    ),
    "deepseek31": (
        DEEPSEEK31, deepseek(DEEPSEEK31, ("weather", NASTY), ("clock", "{}")) + "\n", "",
        [("weather", NASTY), ("clock", "{}")],
    ),
    "deepseek31-as-it-stands": (
        DEEPSEEK31,
        "Well:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "Well:", [("clock", "{}")],
    ),
    "deepseek31-no-outer-marks": (
        DEEPSEEK31, '<｜tool▁call▁begin｜>clock<｜tool▁sep｜> {"a": 1}', "",
        [("clock", '{"a": 1}')],
    ),
    "deepseek31-no-object": (
        DEEPSEEK31, "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>now", "clock<｜tool▁sep｜>now", [],
    ),
    "deepseek31-cut-in-name": (DEEPSEEK31, "a <｜tool▁call▁begin｜>clo", "a clo", []),
    "deepseek31-no-name": (
        DEEPSEEK31, "a<｜tool▁call▁begin｜><｜tool▁sep｜>{}", "a<｜tool▁sep｜>{}", [],
    ),
    "plain": (PLAIN, ' \n{"name": "clock", "arguments": {}}', "", [("clock", "{}")]),
    "plain-list": (
        PLAIN,
        '[{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {"a": 1}}]', "",
        [("clock", "{}"), ("weather", '{"a": 1}')],
    ),
    "plain-then-text": (
        PLAIN, '{"name": "clock", "arguments": {}}\nThere.', "\nThere.", [("clock", "{}")],
    ),
    "json-that-is-no-call": (PLAIN, ' {"name": "Ann", "age": 3}', ' {"name": "Ann", "age": 3}', []),
    "list-that-is-no-call": (PLAIN, "[1, 2] and more", "[1, 2] and more", []),
    "half-json": (PLAIN, '{"na', '{"na', []),
    "broken": (PLAIN, '{"name" "clock"}', '{"name" "clock"}', []),
    "prose": (PLAIN, 'The form is {"name": "clock"}.', 'The form is {"name": "clock"}.', []),
    "blanks": (PLAIN, "  ", "  ", []),
}  # fmt: skip


@pytest.mark.parametrize("name", TALKS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_pieces_do_not_matter(name: str, size: int) -> None:
    form, text, said, calls = TALKS[name]
    heard = read(form, text, size)
    assert (heard.text, heard.calls) == (said, calls)
    assert len(set(heard.ids)) == len(heard.ids)


@given(st.data())
def test_what_has_gone_out_depends_on_the_text_alone(data: st.DataObject) -> None:
    """At every cut, not only at the end: a continued answer relies on it."""
    form, text, _, _ = TALKS[data.draw(st.sampled_from(sorted(TALKS)))]
    cut = data.draw(st.integers(0, len(text)))
    ways = []
    for size in (1, 5):
        reader, heard = CallReader(form, NAMES, call_ids("r", 0)), Heard()
        for start in range(0, cut, size):
            pieces = reader.push(text[start : min(cut, start + size)])
            heard.take(pieces.text, pieces.calls)
        ways.append(heard)
    assert ways[0] == ways[1]


@given(st.text(alphabet='{}[]",:\\ \n<>/_tool_callnameargumentsclockx1', max_size=60))
def test_no_text_breaks_it_and_none_is_lost_without_a_call(text: str) -> None:
    for form, size in itertools.product((HERMES, LLAMA3, PLAIN, DEEPSEEK3), (1, 4)):
        heard = read(form, text, size)
        if not heard.calls and "<tool_call>" not in text:
            assert heard.text == text


def test_calls_after_the_first_are_dropped_where_one_was_asked_for() -> None:
    text = hermes("clock", "{}") + hermes("weather", '{"a": 1}')
    assert read(HERMES, text, several=False).calls == [("clock", "{}")]


def test_ids_are_the_same_each_time_and_differ_between_choices() -> None:
    ids = [call_ids(request, choice)(index)
           for request, choice, index in itertools.product("ab", (0, 1), (0, 1))]  # fmt: skip
    assert len(set(ids)) == 8
    assert call_ids("a", 0)(1) == ids[1]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, PLAIN),
        ("{{ messages }}", PLAIN),
        ("within <tool_call></tool_call> tags: {{ tools }}", HERMES),
        ("{{ tools }} <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function", DEEPSEEK31),
        ("{{ tools }} <｜tool▁calls▁begin｜> ```json", DEEPSEEK3),
        ('{{ tools }} {"name": x, "parameters": y} <|start_header_id|>ipython', LLAMA3),
    ],
)
def test_the_template_shows_the_form(template: str | None, form: ToolFormat) -> None:
    assert format_of(template) is form
