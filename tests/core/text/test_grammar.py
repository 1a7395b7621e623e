"""Schemas are kept or refused by keyword: random answers of a grammar beside a validator (B09)."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer

from core.errors import InvalidRequest, UnsupportedField
from core.text import grammar as grammars
from core.text.schema import MAX_DEPTH
from core.text.tools.formats import DEEPSEEK3, DEEPSEEK31, HERMES, LLAMA3, PLAIN, ToolFormat
from core.types import (
    GenerateRequest,
    ModelName,
    RequestId,
    ResponseFormat,
    Tool,
    ToolChoice,
)
from tests.core.text.walks import spell, vocabulary, walk

SEEDS = range(6)


def closed(properties: dict[str, Any], **more: object) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False, **more,
    }  # fmt: skip


def asking(schema: object = None, **more: Any) -> GenerateRequest:
    text = "" if schema is None else json.dumps(schema, ensure_ascii=False)
    form = None if schema is None else ResponseFormat(schema=text)
    return GenerateRequest(
        id=RequestId("r"), model=ModelName("m"), seed=1, rendered_at=0, response_format=form, **more
    )


def grammar_of(request: GenerateRequest, form: ToolFormat) -> str:
    return grammars.grammar_of(request, form, vocabulary)


@pytest.fixture(scope="module")
def tokens() -> LLTokenizer:
    return vocabulary()


NODE = closed({"v": {"enum": [1, 2]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}})
KEPT: dict[str, dict[str, Any]] = {
    "pattern+maxLength": closed({"a": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}}),
    "pattern-inside": closed({"a": {"type": "string", "pattern": "[a-z]+"}}),
    "minLength+maxLength": {"type": "string", "minLength": 2, "maxLength": 4},
    "patternProperties": {
        "type": "object", "patternProperties": {"^n_": {"type": "integer"}},
        "additionalProperties": False, "minProperties": 1, "maxProperties": 2,
    },
    "named-and-pattern": {
        "type": "object", "properties": {"n_a": {"type": "string"}},
        "patternProperties": {"^n_": {"type": "string", "maxLength": 2}},
        "additionalProperties": False,
    },
    "additional": {
        "type": "object", "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
    },
    "multipleOf": closed({"a": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99}}),
    "halves": {"type": "number", "multipleOf": 0.5, "minimum": -3, "maximum": 3},
    "minimum+maximum": {"type": "integer", "minimum": 13, "maximum": 17},
    "exclusive": {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.25},
    "enum-mixed": closed({"a": {"enum": [12, None, "žluť", "天", True, {"x": [1]}, 1.5]}}),
    "const": {"const": {"a": [1, None], "b": 'q"\\\n'}},
    "self-ref": {"$ref": "#/$defs/n", "$defs": {"n": NODE}},
    "oneOf": {"oneOf": [{"type": "integer", "minimum": 5, "maximum": 9}, {"enum": ["x", "y"]}]},
    "anyOf-required": {
        "type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "additionalProperties": False,
    },
    "allOf": {"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b", "maxLength": 9}]},
    "two-optional": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}, "c": {"enum": [4]}},
        "required": ["a"], "additionalProperties": False,
    },
    "minItems=maxItems": {
        "type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "maxItems": 3,
    },
    "prefixItems": {
        "type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}],
        "items": {"type": "null"}, "minItems": 1, "maxItems": 3,
    },
    "beside-ref": {"$ref": "#/$defs/a", "minLength": 3, "$defs": {"a": {"maxLength": 4}}},
    "no-type": {"minimum": 3, "minLength": 2, "minItems": 1},
    "key-outside-ascii": closed({'é"x': {"type": "integer"}}),
    "unique-false": {"type": "array", "uniqueItems": False, "maxItems": 2, "items": {"const": 1}},
    "format": {"type": "string", "format": "uuid"},
    "anything": {},
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_whatever_a_grammar_lets_through_fits_the_schema(name: str, tokens: LLTokenizer) -> None:
    validator = jsonschema.Draft202012Validator(KEPT[name])
    grammar = grammar_of(asking(KEPT[name]), PLAIN)
    answers = [walk(tokens, grammar, seed) for seed in SEEDS]
    ended = [answer for answer in answers if answer is not None]
    assert ended
    for answer in ended:
        validator.validate(json.loads(answer))


REFUSED: dict[str, dict[str, Any]] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "divisibleBy": {"type": "integer", "divisibleBy": 3},
    "items as a list": {"type": "array", "items": [{"type": "integer"}]},
    "exclusiveMinimum": {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
    "minProperties": {"type": "object", "minProperties": 2},
    "multipleOf": {"type": "number", "multipleOf": 0.01},
    "x-guidance": {"type": "object", "x-guidance": {"lenient": True}, "not": {}},
    "pattern": {"type": "string", "pattern": "(["},
    "type": {"type": "strnig"},
    "$ref": {"$ref": "#/$defs/none"},
    "format": {"type": "string", "format": "zzz"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 7}]},
    "patternProperties": {
        "type": "object", "patternProperties": {"^a": {"type": "integer"}, "^ab": {"minimum": 5}},
    },
}  # fmt: skip


@pytest.mark.parametrize("keyword", REFUSED)
@pytest.mark.parametrize("deep", [False, True], ids=["top", "inside"])
def test_what_cannot_be_enforced_is_refused_by_its_name(keyword: str, deep: bool) -> None:
    schema = REFUSED[keyword]
    if deep and keyword != "$ref":
        schema = closed({"a": {"type": "array", "items": {"anyOf": [schema, {"type": "null"}]}}})
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(asking(schema), PLAIN)
    assert f"'{keyword}'" in refused.value.message
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    "schema",
    [
        closed({"a": {"type": "string", "minLength": 9, "maxLength": 2}}),
        {"enum": []},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "integer", "minimum": 1.2, "maximum": 1.8},
        {"properties": []},
        {"minLength": "3"},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}, {"type": "string"}]},
        [],
        3,
    ],
)
def test_a_schema_that_nothing_fits_is_refused(schema: object) -> None:
    with pytest.raises(InvalidRequest):
        grammar_of(asking(schema), PLAIN)


def test_a_schema_that_is_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(MAX_DEPTH + 1):
        schema = closed({"a": schema})
    with pytest.raises(UnsupportedField, match="nested"):
        grammar_of(asking(schema), PLAIN)


def test_schemas_that_are_too_large_together_are_refused() -> None:
    wide = {"enum": [f"value {n}" for n in range(6000)]}
    assert grammar_of(asking(wide), PLAIN)
    with pytest.raises(UnsupportedField, match="150000 characters together"):
        grammar_of(asking(closed({"a": wide, "b": wide, "c": wide})), PLAIN)


def test_a_schema_with_too_many_ways_on_is_refused_before_the_first_byte() -> None:
    """It compiles and has a first token; the second one is too much for the parser."""
    assert grammar_of(asking(closed({f"k{n}": {} for n in range(200)})), PLAIN)
    open_keys = {"type": "object", "properties": {f"k{n}": {} for n in range(1200)}}
    with pytest.raises(InvalidRequest, match=r"'response_format.*(too many|max is)"):
        grammar_of(asking(open_keys), PLAIN)


def test_keys_keep_the_callers_order_and_white_space_has_an_end(tokens: LLTokenizer) -> None:
    """B09: key order; and no model can write blanks until its limit."""
    grammar = grammar_of(asking(closed({"zeta": {"const": 1}, "alpha": {"const": 2}})), PLAIN)
    assert spell(tokens, grammar, '{"zeta":1,"alpha":2}')[0]
    assert spell(tokens, grammar, '{\n  "zeta": 1,\n  "alpha": 2\n}')[0]
    assert spell(tokens, grammar, '{"alpha"')[1] == len('{"')
    assert spell(tokens, grammar, "{\n\n")[1] == 2
    assert spell(tokens, grammar, "{   ")[1] == 2


def test_any_object_is_an_object(tokens: LLTokenizer) -> None:
    request = GenerateRequest(
        id=RequestId("r"), model=ModelName("m"), seed=1, rendered_at=0,
        response_format=ResponseFormat(),
    )  # fmt: skip
    grammar = grammar_of(request, PLAIN)
    for seed in SEEDS:
        answer = walk(tokens, grammar, seed)
        assert answer is None or isinstance(json.loads(answer), dict)
    assert spell(tokens, grammar, "[")[1] == 0


# ------------------------------------------------------------------ tools

CITY = Tool(
    name="weather",
    parameters=json.dumps(
        {**closed({"city": {"$ref": "#/$defs/c"}}), "$defs": {"c": {"type": "string"}}}
    ),
)
CLOCK = Tool(name="clock")
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city":"Oslo"}}',
    "plain": '{"name": "weather", "arguments": {"city":"Oslo"}}',
    "deepseek3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city":"Oslo"}\n```<｜tool▁call▁end｜>',
    "deepseek31": '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city":"Oslo"}<｜tool▁call▁end｜>',
}
CLOCKS = {name: call.replace("weather", "clock").replace('{"city":"Oslo"}', "{}")
          for name, call in CALLS.items()}  # fmt: skip
FORMS = {form.name: form for form in (HERMES, LLAMA3, PLAIN, DEEPSEEK3, DEEPSEEK31)}
EACH_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def _said(form: ToolFormat, *calls: str) -> str:
    return form.around[0] + form.between.join(calls) + form.around[1]


@EACH_FORM
def test_a_forced_call_is_a_call_and_nothing_else(form: ToolFormat, tokens: LLTokenizer) -> None:
    grammar = grammar_of(asking(tools=(CITY, CLOCK), tool_choice=ToolChoice.REQUIRED), form)
    one, other = _said(form, CALLS[form.name]), _said(form, CLOCKS[form.name])
    assert spell(tokens, grammar, one)[0]
    assert spell(tokens, grammar, other)[0]
    both = _said(form, CALLS[form.name], CLOCKS[form.name])
    assert spell(tokens, grammar, both)[0] is form.several
    assert spell(tokens, grammar, "Hello")[1] == 0
    assert spell(tokens, grammar, one.replace("city", "town"))[0] is False
    assert spell(tokens, grammar, one.replace("weather", "whether"))[0] is False


@EACH_FORM
def test_a_named_tool_is_called_once_and_alone(form: ToolFormat, tokens: LLTokenizer) -> None:
    named = asking(tools=(CITY, CLOCK), tool_choice=ToolChoice.REQUIRED, forced_tool="clock")
    grammar = grammar_of(named, form)
    assert spell(tokens, grammar, _said(form, CLOCKS[form.name]))[0]
    assert not spell(tokens, grammar, _said(form, CALLS[form.name]))[0]
    assert not spell(tokens, grammar, _said(form, CLOCKS[form.name], CLOCKS[form.name]))[0]


@EACH_FORM
def test_one_call_at_a_time_when_the_caller_says_so(form: ToolFormat, tokens: LLTokenizer) -> None:
    asked = asking(tools=(CLOCK,), tool_choice=ToolChoice.REQUIRED, parallel_tool_calls=False)
    call = CLOCKS[form.name]
    assert spell(tokens, grammar_of(asked, form), _said(form, call))[0]
    assert not spell(tokens, grammar_of(asked, form), _said(form, call, call))[0]


@EACH_FORM
def test_strict_tools_bind_calls_and_leave_text_alone(
    form: ToolFormat, tokens: LLTokenizer
) -> None:
    strict = Tool(name=CITY.name, parameters=CITY.parameters, strict=True)
    grammar = grammar_of(asking(tools=(strict, CLOCK)), form)
    call = _said(form, CALLS[form.name])
    assert spell(tokens, grammar, call)[0]
    assert spell(tokens, grammar, "It is sunny {in} <b>Oslo</b>.")[0]
    assert not spell(tokens, grammar, call.replace("city", "town"))[0]
    if form.opening:
        assert spell(tokens, grammar, f"Let me see. {call}\n{call}")[0]


@EACH_FORM
def test_a_schema_beside_tools_takes_a_call_or_the_document(
    form: ToolFormat, tokens: LLTokenizer
) -> None:
    named = {"$ref": "#/$defs/n", "$defs": {"n": closed({"name": {"type": "string"}})}}
    strict = Tool(name=CITY.name, parameters=CITY.parameters, strict=True)
    grammar = grammar_of(asking(named, tools=(strict, CLOCK)), form)
    assert spell(tokens, grammar, '{"name":"Ann"}')[0]
    assert spell(tokens, grammar, '{"name": "weather"}')[0]
    call = _said(form, CALLS[form.name])
    assert spell(tokens, grammar, call)[0]
    assert not spell(tokens, grammar, call.replace("city", "town"))[0]
    assert not spell(tokens, grammar, "Hello")[0]


def test_nothing_binds_an_answer_that_may_be_anything() -> None:
    assert grammar_of(asking(tools=(CITY, CLOCK)), HERMES) == ""
    assert grammar_of(asking(tools=(CITY,), tool_choice=ToolChoice.NONE), HERMES) == ""
    assert grammar_of(asking(), PLAIN) == ""


def test_a_forced_tools_schema_is_refused_where_it_stands() -> None:
    tools = (CLOCK, Tool(name="bad", parameters='{"type": "object", "not": {}}'))
    with pytest.raises(UnsupportedField, match="'not'") as refused:
        grammar_of(asking(tools=tools, tool_choice=ToolChoice.REQUIRED), PLAIN)
    assert refused.value.param == "tools[1].function.parameters"
    assert grammar_of(asking(tools=tools), PLAIN) == ""  # it is only shown to the model
