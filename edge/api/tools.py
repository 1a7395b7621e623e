"""`tools`, `tool_choice` and `response_format` in OpenAI's shape, as the inner form of a request.

Shapes are checked here; whether a schema can be enforced is for the region to say, which knows the
model. Schemas become JSON text again: nothing here looks into them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import InvalidRequest, UnsupportedField
from core.types import ResponseFormat, Tool, ToolChoice
from edge.api.openai_types import (
    FunctionIn,
    NamedTool,
    ResponseFormatIn,
    ToolIn,
)

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_WORDS = {"none": ToolChoice.NONE, "auto": ToolChoice.AUTO, "required": ToolChoice.REQUIRED}


@dataclass(frozen=True, slots=True)
class Tooling:
    """What a body says about calls. `forced`: the name of the tool that must be called."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice.AUTO
    forced: str = ""
    parallel: bool = True


def read_tools(
    tools: Sequence[ToolIn] | None,
    tool_choice: str | NamedTool | None,
    parallel_tool_calls: bool | None,
) -> Tooling:
    """Raises InvalidRequest, UnsupportedField."""
    given = tuple(_tool(one, f"tools[{n}]") for n, one in enumerate(tools or ()))
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"'tools' holds more than {MAX_TOOLS} tools.", param="tools")
    names = [tool.name for tool in given]
    for n, name in enumerate(names):
        if name in names[:n]:
            raise InvalidRequest(
                f"'tools[{n}].function.name': {name!r} is there twice.",
                param=f"tools[{n}].function.name",
            )
    choice, forced = _choice(tool_choice, names)
    return Tooling(given, choice, forced, parallel_tool_calls is not False)


def read_response_format(
    given: ResponseFormatIn | None, param: str = "response_format"
) -> ResponseFormat | None:
    """None for free text. Raises InvalidRequest, UnsupportedField."""
    if given is None:
        return None
    if given.json_schema is not None and given.type != "json_schema":
        raise InvalidRequest(
            f"'{param}.json_schema' goes with the type 'json_schema'.", param=f"{param}.json_schema"
        )
    match given.type:
        case "text":
            return None
        case "json_object":
            return ResponseFormat(param=param)
        case "json_schema":
            inner = f"{param}.json_schema"
            if given.json_schema is None:
                raise InvalidRequest(f"'{inner}' is required.", param=inner)
            _named(given.json_schema.name, f"{inner}.name")
            if given.json_schema.schema is None:
                raise InvalidRequest(f"'{inner}.schema' is required.", param=f"{inner}.schema")
            schema = schema_text(given.json_schema.schema)
            return ResponseFormat(schema=schema, param=f"{inner}.schema")
        case "grammar" | "python":
            raise UnsupportedField(
                f"'{param}.type': {given.type!r} is not supported; text, json_object and"
                " json_schema are.",
                param=f"{param}.type",
            )
        case other:
            raise InvalidRequest(
                f"'{param}.type': {other[:40]!r} is none of text, json_object, json_schema.",
                param=f"{param}.type",
            )


def schema_text(given: dict[str, Any] | None) -> str:
    """A schema as the region reads it; "" where there is none."""
    return "" if given is None else msgspec.json.encode(given).decode()


def _tool(given: ToolIn, at: str) -> Tool:
    if given.type != "function":
        raise UnsupportedField(
            f"'{at}.type': {given.type[:40]!r} is not supported; only 'function' is.",
            param=f"{at}.type",
        )
    function: FunctionIn | None = given.function
    if function is None:
        raise InvalidRequest(f"'{at}.function' is required.", param=f"{at}.function")
    return Tool(
        name=_named(function.name, f"{at}.function.name"),
        description=function.description or "",
        parameters=schema_text(function.parameters),
        strict=bool(function.strict),
    )


def _choice(given: str | NamedTool | None, names: Sequence[str]) -> tuple[ToolChoice, str]:
    if given is None:
        return ToolChoice.AUTO, ""
    if isinstance(given, NamedTool):
        return ToolChoice.REQUIRED, _forced(given, names)
    choice = _WORDS.get(given)
    if choice is None:
        raise InvalidRequest(
            f"'tool_choice': {given[:40]!r} is none of none, auto, required, nor does it name a"
            " function.",
            param="tool_choice",
        )
    if choice is ToolChoice.REQUIRED and not names:
        raise InvalidRequest(
            "'tool_choice' asks for a call; 'tools' is empty.", param="tool_choice"
        )
    return choice, ""


def _forced(given: NamedTool, names: Sequence[str]) -> str:
    if given.type != "function":
        raise UnsupportedField(
            f"'tool_choice.type': {given.type[:40]!r} is not supported; only 'function' is.",
            param="tool_choice.type",
        )
    if given.function is None:
        raise InvalidRequest("'tool_choice.function' is required.", param="tool_choice.function")
    if given.function.name not in names:
        raise InvalidRequest(
            f"'tool_choice': 'tools' has no function {given.function.name[:64]!r}.",
            param="tool_choice",
        )
    return given.function.name


def _named(name: str, param: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"'{param}': {name[:80]!r} is not made of 1 to 64 letters, digits, '_' and '-'.",
            param=param,
        )
    return name
