"""Tools for models whose chat template knows none: a stated system message, and turns that any
template takes. What is written here is what the `PLAIN` form reads back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from core.types import Message, Tool, ToolCall, ToolChoice

_INTRODUCTION = """\
You can call these functions, one JSON object a line:
{functions}
To call a function, answer with nothing but one JSON object that has its name and its arguments:
{{"name": "…", "arguments": {{…}}}}"""


def describe(tool: Tool) -> dict[str, Any]:
    """A tool as templates take it: the function of OpenAI's form. JSON of the caller's."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = json.loads(tool.parameters)
    return function


def introduction(tools: Sequence[Tool], choice: ToolChoice, forced: str) -> str:
    """What the model is told of its tools."""
    lines = "\n".join(json.dumps(describe(tool), ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(functions=lines)
    if forced:
        return f"{text}\nCall the function {forced} now."
    return f"{text}\nCall a function now." if choice is ToolChoice.REQUIRED else text


def with_introduction(
    messages: Sequence[Message], text: str, *, system: bool
) -> tuple[Message, ...]:
    """`text` in the first system turn, or, where the template takes none, in the first turn."""
    first = messages[0]
    if first.role in ("system", "developer") or not system:
        joined = f"{text}\n\n{first.content}" if not system else f"{first.content}\n\n{text}"
        return (msgspec.structs.replace(first, content=joined), *messages[1:])
    return (Message(role="system", content=text), *messages)


def spelled(messages: Sequence[Message], *, may_call: bool) -> tuple[Message, ...]:
    """Calls as text of their turn, results as the user's; results in a row become one turn. After
    results that are still to be answered small models need to be told to do so. `may_call`: with
    another call too."""
    names = {call.id: call.name for one in messages for call in one.tool_calls}
    turns: list[Message] = []
    before = ""
    for one in messages:
        if one.role == "tool":
            name = names.get(one.tool_call_id or "")
            result = f"Result of {name}: {one.content}" if name else f"Result: {one.content}"
            if before == "tool":
                joined = f"{turns.pop().content}\n{result}"
                turns.append(Message(role="user", content=joined))
            else:
                turns.append(Message(role="user", content=result))
        elif one.tool_calls:
            lines = [one.content] if one.content else []
            lines += map(_call, one.tool_calls)
            turns.append(Message(role=one.role, content="\n".join(lines), name=one.name))
        else:
            turns.append(one)
        before = one.role
    if before == "tool":
        hint = "Answer in words, or call another function." if may_call else "Answer in words."
        turns.append(Message(role="user", content=f"{turns.pop().content}\n{hint}"))
    return tuple(turns)


def _call(call: ToolCall) -> str:
    return f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}'
