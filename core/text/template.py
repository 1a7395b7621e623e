"""A model's chat template: messages → text whose every piece knows who wrote it.

Callers' texts are marked before rendering with two private characters, inside their outer white
space so that a template may still trim them. The marks show which parts of the result are the
template's own words; only those may become control tokens (`control`). A template that looks into
a text (does it start with…, split at…) could see the marks and act otherwise, so the result without
marks is compared with a rendering of the bare texts. When they differ, only what looks like control
tokens is broken up instead, with one private character inside each; when even that changes what the
template does (it cuts at its own `</think>`), only special tokens are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from jinja2 import TemplateError, meta

from core.errors import ConfigError, InvalidRequest, TemplateRefused
from core.text.marks import PRIVATE, Breaker, Mark, Marks, Piece, free_marks
from core.text.sandbox import Meter, TemplateSandbox, strftime_at
from core.text.tools.fallback import describe, introduction, spelled, with_introduction
from core.text.tools.formats import PLAIN, ToolFormat, format_of
from core.types import Message, Tool, ToolCall, ToolChoice

CPU_S = 2.0
"""One rendering; ordinary ones take less than a hundredth of that."""
CHARS = 1 << 20
"""What a template may write beyond four times its messages."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
"""Roles are words of the template: some build a control token around them."""


@dataclass(frozen=True, slots=True)
class _Chat:
    """What is rendered. `tools` as JSON that only the template looks into."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]
    rendered_at: int
    size: int
    """Characters of it all."""


class ChatTemplate:
    """One compiled template. `controls`: texts of the model's control tokens → special or not.
    `form`: how the model writes calls."""

    def __init__(self, source: str, names: Mapping[str, str], controls: Mapping[str, bool]) -> None:
        self._sandbox = TemplateSandbox()
        try:
            self._template = self._sandbox.from_string(source)
            asked = meta.find_undeclared_variables(self._sandbox.parse(source))
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not parse: {error}") from error
        self._takes_tools = "tools" in asked
        self._knows_calls = "tool_calls" in source
        self.form: ToolFormat = format_of(source) if self._takes_tools else PLAIN
        self._names = names
        self._knows_developer = "developer" in source
        self._private = frozenset(PRIVATE.findall(source))
        self._breakers = (
            Breaker(tuple(controls)),
            Breaker([text for text, special in controls.items() if special]),
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        rendered_at: int,
        tools: Sequence[Tool] = (),
        choice: ToolChoice = ToolChoice.AUTO,
        forced_tool: str = "",
    ) -> list[Piece]:
        """The chat up to where the assistant speaks. `rendered_at`: its now, in Unix seconds.

        A template that knows no tools, or no calls, is given them in words (`tools.fallback`).
        Raises InvalidRequest without messages, TemplateRefused when the template refuses them or
        cannot render them.
        """
        if not messages:
            raise InvalidRequest("messages is empty", param="messages")
        if choice is ToolChoice.NONE:
            tools = ()
        may_call = bool(tools)
        if tools and not self._takes_tools:
            text = introduction(tools, choice, forced_tool)
            messages = with_introduction(messages, text, system=self._takes_system)
            tools = ()
        if not self._knows_calls:
            messages = spelled(messages, may_call=may_call)
        chat = _Chat(
            messages,
            [describe(tool) for tool in tools],
            rendered_at,
            sum(map(_size, messages)) + sum(map(_tool_size, tools)),
        )
        return self._pieces(chat)

    def _pieces(self, chat: _Chat) -> list[Piece]:
        used = set(self._private)

        def look(text: str) -> str:
            used.update(PRIVATE.findall(text))
            return text

        bare = self._text(chat, look)
        marks = free_marks(used)
        marked = self._text_like(bare, chat, marks, marks.wrap)
        pieces = None if marked is None else marks.wrapped_pieces(marked)
        if pieces is not None:
            return pieces
        for breaker in self._breakers:
            mark = partial(breaker.mark, split=marks.split)
            broken = self._text_like(bare, chat, marks, mark)
            if broken is not None:
                break
        else:  # safe, though not quite what the template makes of the bare texts
            mark = partial(self._breakers[0].mark, split=marks.split)
            broken = self._text(chat, mark)
        return [Piece(text, own=True) for text in broken.split(marks.split)]

    @cached_property
    def _takes_system(self) -> bool:
        """Does it render a conversation that begins with a system turn?"""
        turns = (Message(role="system", content="x"), Message(role="user", content="x"))
        try:
            self._text(_Chat(turns, (), 0, 2), lambda text: text)
        except TemplateRefused:
            return False
        return True

    def _text_like(self, bare: str, chat: _Chat, marks: Marks, mark: Mark) -> str | None:
        """A rendering with marks; None when they made the template do something else."""
        try:
            text = self._text(chat, mark)
        except TemplateRefused:
            return None
        return text if marks.drop(text) == bare else None

    def _text(self, chat: _Chat, mark: Mark) -> str:
        turns = [self._turn(message, mark) for message in chat.messages]
        tools = [{"type": "function", "function": _marked(tool, mark)} for tool in chat.tools]
        try:
            return self._sandbox.render(
                self._template,
                Meter(cpu_s=CPU_S, chars=CHARS + 4 * chat.size),
                messages=turns,
                add_generation_prompt=True,
                tools=tools or None,
                documents=None,
                strftime_now=strftime_at(chat.rendered_at),
                **self._names,
            )
        except TemplateRefused:
            raise
        except Exception as error:
            # Whatever a template does wrong is about this conversation: the caller is told.
            raise TemplateRefused(
                f"the model's chat template cannot render these messages: {error}",
                param="messages",
            ) from error

    def _turn(self, message: Message, mark: Mark) -> dict[str, object]:
        role = message.role
        if role == "developer" and not self._knows_developer:
            role = "system"
        turn: dict[str, object] = {
            "role": role if role in _ROLES else mark(role),
            "content": mark(message.content or ""),
        }
        if message.name is not None:
            turn["name"] = mark(message.name)
        if message.tool_calls:
            turn["tool_calls"] = [_call(call, mark) for call in message.tool_calls]
        if message.tool_call_id is not None:
            turn["tool_call_id"] = mark(message.tool_call_id)
        return turn


class Arguments(dict[str, object]):
    """A tool call's arguments: a mapping to templates that walk it, JSON text to those that join.

    The text is the client's own. Keys are marked like any text of the client's, and still found by
    their bare names.
    """

    def __init__(self, values: dict[str, object], text: str, mark: Mark) -> None:
        super().__init__({mark(key): _deep(value, mark) for key, value in values.items()})
        self._text = text
        self._marked = {key: mark(key) for key in values}

    def __missing__(self, key: str) -> object:
        marked = self._marked.get(key, key)
        if marked == key:
            raise KeyError(key)
        return self[marked]

    def __contains__(self, key: object) -> bool:
        return key in self._marked or super().__contains__(key)

    def get(self, key: str, default: object = None) -> object:
        try:
            return self[key]
        except KeyError:
            return default

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _call(call: ToolCall, mark: Mark) -> dict[str, object]:
    text = mark(call.arguments)
    arguments: str | Arguments = text
    try:
        values = json.loads(call.arguments or "{}")
        json.dumps(values, ensure_ascii=False).encode()  # half a surrogate pair is not text
        if isinstance(values, dict):
            arguments = Arguments(values, text, mark)
    except (ValueError, RecursionError):
        arguments = text  # an old call that was never valid JSON is still part of the talk
    return {
        "id": mark(call.id),
        "type": "function",
        "function": {"name": mark(call.name), "arguments": arguments},
    }


def _marked(function: Mapping[str, Any], mark: Mark) -> dict[str, object]:
    """A tool whose own words are the caller's; the names of OpenAI's fields are not."""
    return {key: _deep(value, mark) for key, value in function.items()}


def _tool_size(tool: Tool) -> int:
    return len(tool.name) + len(tool.description) + len(tool.parameters)


def _size(message: Message) -> int:
    return len(message.content or "") + sum(len(call.arguments) for call in message.tool_calls)


def _deep(value: Any, mark: Mark) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, dict):
        return {mark(key): _deep(item, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_deep(item, mark) for item in value]
    return value
