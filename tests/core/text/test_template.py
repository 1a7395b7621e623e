"""Odd but legal conversations, and what templates are shown (B07)."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import ConfigError, InvalidRequest, TemplateRefused
from core.text.marks import Piece
from core.text.model import load_text
from core.text.template import ChatTemplate
from core.types import Message, ToolCall
from tests.core.text import templates
from tests.tiny_text import CHATML, write_tiny_folder

USER = Message(role="user", content="hi")
CALL = ToolCall(id="c1", name="f", arguments='{"a": "x", "n": 1}')


def text(source: str, *messages: Message, rendered_at: int = 0, **names: str) -> str:
    template = ChatTemplate(source, names, {"<|im_end|>": True})
    return "".join(piece.text for piece in template.render(messages, rendered_at=rendered_at))


def test_no_messages_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequest) as caught:
        text("x")
    assert caught.value.param == "messages"


def test_a_templates_own_refusal_carries_its_words() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate") as caught:
        text(templates.MISTRAL.template, USER, USER, bos_token="<s>", eos_token="</s>")
    assert (caught.value.http_status, caught.value.code) == (400, "template_refused")
    with pytest.raises(TemplateRefused, match="Only user and assistant"):
        text(templates.MISTRAL.template, USER, Message(role="system", content="a"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[99].content.x }}",
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{% include 'other' %}",
        "{{ messages.x.y }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__ ~ ''.__class__.__mro__ }}",
    ],
)
def test_what_a_template_cannot_do_is_a_400_never_a_500(source: str) -> None:
    with pytest.raises(TemplateRefused, match="cannot render"):
        text(source, USER)


@pytest.mark.parametrize("source", ["{% for x in %}", "{{ messages | nothing_like_it }}"])
def test_a_template_that_does_not_parse_is_found_at_start(tmp_path: Path, source: str) -> None:
    with pytest.raises(ConfigError, match="does not parse"):
        load_text(write_tiny_folder(tmp_path, template=source))


def test_no_content_is_an_empty_text_and_calls_are_shown() -> None:
    answer = Message(role="assistant", tool_calls=(CALL,))
    result = Message(role="tool", content="42", tool_call_id="c1")
    source = (
        "{% for m in messages %}{{ m.role + ':' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }},{{ c.type }},{{ c.function.name }}{% endfor %}"
        "{% if m.tool_call_id %}->{{ m.tool_call_id }}{% endif %};{% endfor %}"
    )
    assert text(source, USER, answer, result) == "user:hi;assistant:c1,function,f;tool:42->c1;"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ a | tojson }}", '{"a": "x", "n": 1}'),
        ("{{ '[' + a + ']' }}", '[{"a":"x","n":1}]'),
        ("{{ '[' ~ a ~ ']' }}", '[{"a":"x","n":1}]'),
        ("{{ a }}", '{"a":"x","n":1}'),
        ("{% for k, v in a.items() %}{{ k }}={{ v }} {% endfor %}", "a=x n=1 "),
        ("{{ a is mapping }}{{ a is string }}{{ a['a'] }}{{ a.n + 1 }}", "TrueFalsex2"),
        ("{{ 'n' in a }}{{ 'm' in a }}{{ a.get('a') }}{{ a.get('m', 7) }}{{ a.m }}", "TrueFalsex7"),
    ],
)
def test_arguments_suit_templates_that_join_and_templates_that_walk(
    source: str, shown: str
) -> None:
    call = ToolCall(id="c", name="f", arguments='{"a":"x","n":1}')
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}" + source
    assert text(source, Message(role="assistant", tool_calls=(call,))) == shown


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "{broken",
        "[1]",
        '"text"',
        "null",
        "NaN",
        '{"a": "\\ud800"}',
        "[" * 5000,
        '{"a":' * 900 + "1" + "}" * 900,
    ],
)
def test_old_arguments_of_any_kind_are_part_of_the_talk(arguments: str) -> None:
    call = ToolCall(id="c", name="f", arguments=arguments)
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ 'x' ~ a }}"
    assert text(source, Message(role="assistant", tool_calls=(call,))) == "x" + arguments


def test_developer_is_system_unless_the_template_knows_better() -> None:
    developer = Message(role="developer", content="d")
    source = "{{ messages[0].role }}{# #}"
    assert text(source, developer) == "system"
    assert text(source + "{% if messages[0].role == 'developer' %}!{% endif %}", developer) == (
        "developer!"
    )


def test_now_is_the_requests_now_in_utc() -> None:
    assert text("{{ strftime_now('%Y-%m-%d') }}", USER, rendered_at=86_399) == "1970-01-01"
    assert text("{{ strftime_now('%Y-%m-%d') }}", USER, rendered_at=86_400) == "1970-01-02"


def test_pieces_say_who_wrote_them() -> None:
    template = ChatTemplate(CHATML, {}, {})
    pieces = template.render([Message(role="user", content=" a b\n")], rendered_at=0)
    assert [piece for piece in pieces if not piece.own] == [Piece("a b", own=False)]
    assert "".join(piece.text for piece in pieces).startswith("<|im_start|>user\n a b\n<|im_end|>")


def test_private_characters_of_a_caller_are_kept_and_mark_nothing() -> None:
    private = "".join(map(chr, range(0x100000, 0x100010)))
    content = f"a{private}<|im_end|>{private}b"
    template = ChatTemplate(CHATML, {}, {"<|im_end|>": True})
    pieces = template.render([Message(role="user", content=content)], rendered_at=0)
    assert Piece(content, own=False) in pieces


def test_marks_hide_in_escapes_no_better() -> None:
    arguments = '{"a": "\\udbc0\\udc01<|im_end|>\\udbc0\\udc00\\udbc0\\udc02"}'
    call = ToolCall(id="c", name="f", arguments=arguments)
    source = "{{ messages[0].tool_calls[0].function.arguments['a'] }}"
    template = ChatTemplate(source, {}, {"<|im_end|>": True})
    chat = [Message(role="assistant", tool_calls=(call,))]
    assert template.render(chat, rendered_at=0) == [
        Piece("\U00100001<|im_end|>\U00100000\U00100002", own=False)
    ]


def test_every_private_character_at_once_is_refused() -> None:
    everything = "".join(map(chr, range(0x100000, 0x10FFFE)))
    with pytest.raises(InvalidRequest, match="private character"):
        text(CHATML, Message(role="user", content=everything))


def test_a_loop_bomb_ends(tmp_path: Path) -> None:
    bomb = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    model = load_text(write_tiny_folder(tmp_path, template=bomb))
    with pytest.raises(TemplateRefused, match="makes more than"):
        model.encode_chat([USER], rendered_at=0)
