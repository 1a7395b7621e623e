"""What an answer must fit, as a grammar: built from a schema or from tools, checked before any
token is made. Pure; the matcher that follows an answer is `core.engine.grammar`.

Grammars are llguidance's Lark dialect. White space between the parts of a document is bounded: a
model that is unsure would else go on with blanks for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from core.errors import InvalidRequest, RequestError, UnsupportedField
from core.text.schema import Schema, moved, read_schema
from core.text.tools.formats import ToolFormat
from core.types import GenerateRequest, ResponseFormat, Tool, ToolChoice

MOST_CHARS = 150_000
"""Of one grammar: what is larger takes so long to compile that a whole batch would wait for it."""
_STEPS = 8
"""Tokens of an answer that are tried: a grammar with too many ways on compiles, and fails then."""
_BLANKS = {"whitespace_pattern": r"(\n {0,24}| ?)"}
"""Between tokens of JSON: a line break with its indentation, or at most one space."""
_ANY_OBJECT: Schema = {"type": "object"}
_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
_NAMED = (
    (re.compile(r"Unimplemented keys: \[(.*?)\]"), None),
    (re.compile(r"patternPropert"), "patternProperties"),
    (re.compile(r"regex", re.IGNORECASE), "pattern"),
    (re.compile(r"Pointer|Resource|retriev|\$ref"), "$ref"),
    (re.compile(r"oneOf"), "oneOf"),
    (re.compile(r"[Ff]ormat"), "format"),
    (re.compile(r"Invalid type"), "type"),
)
_PLACE = re.compile(r"^at \d+\(\d+\): |^failed to compile JSON schema: ")


def limits() -> LLParserLimits:
    """Of work on one grammar. Its errors must not repeat what the model wrote."""
    return LLParserLimits(verbose_errors=False)


def grammar_tokens(tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> LLTokenizer:
    """The vocabulary as grammars need it; takes about a quarter of a second for 50,000 tokens.

    Raises UnsupportedField when the tokenizer's kind is not known there.
    """
    if not end_ids:
        raise UnsupportedField("this model has no end token, which a schema or forced tool needs")
    try:
        return LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=sorted(end_ids))
    except ValueError as error:
        raise UnsupportedField(
            "this model's tokenizer cannot be used with a schema or a forced tool"
        ) from error


@dataclass(frozen=True, slots=True)
class _Call:
    """One tool in a grammar: its name and what its arguments fit."""

    name: str
    arguments: Schema


@dataclass(slots=True)
class _Parts:
    """The schemas of a grammar, with the fields that brought them."""

    found: list[tuple[str, Schema]] = field(default_factory=list)

    def read(self, text: str, param: str) -> Schema:
        schema = read_schema(text, param)
        self.found.append((param, schema))
        return schema


def grammar_of(
    request: GenerateRequest, form: ToolFormat, tokens: Callable[[], LLTokenizer]
) -> str:
    """The grammar of an answer to `request`; "" when anything goes. `form`: how the model calls;
    `tokens` is asked for only when there is a grammar.

    Raises InvalidRequest for what is no schema or what nothing fits, UnsupportedField naming the
    keyword that cannot be enforced.
    """
    parts = _Parts()
    grammar = _built(request, form, parts)
    if len(grammar) > MOST_CHARS:
        param = parts.found[0][0]
        raise UnsupportedField(
            f"'{param}': the schemas of a request may have {MOST_CHARS} characters together",
            param=param,
        )
    if grammar:
        said = _complaint(grammar, tokens())
        if said:
            raise _blame(said, parts)
    return grammar


def _built(request: GenerateRequest, form: ToolFormat, parts: _Parts) -> str:
    document = _document(request.response_format, parts)
    choice = request.tool_choice if request.tools else ToolChoice.NONE
    if choice is ToolChoice.NONE:
        return "" if document is None else _rules(["document"], document=document)
    forced = choice is ToolChoice.REQUIRED
    calls = [
        _Call(tool.name, _arguments(tool, parts, f"tools[{n}].function.parameters", forced))
        for n, tool in enumerate(request.tools)
        if request.forced_tool in ("", tool.name)
    ]
    several = request.parallel_tool_calls and not request.forced_tool and form.several
    if forced:
        return _rules(["calls"], calls=calls, form=form, several=several)
    if document is not None and not form.opening:
        return _rules(["document"], document=_either(calls, document, form))
    if document is not None:
        starts = ["calls", "document"]
        return _rules(starts, document=document, calls=calls, form=form, several=several)
    if not any(tool.strict for tool in request.tools):
        return ""
    start = ["text_with_calls"] if form.opening else ["calls", "FREE"]
    return _rules(start, calls=calls, form=form, several=several)


def _document(wanted: ResponseFormat | None, parts: _Parts) -> Schema | None:
    if wanted is None:
        return None
    return parts.read(wanted.schema, wanted.param) if wanted.schema else _ANY_OBJECT


def _arguments(tool: Tool, parts: _Parts, param: str, forced: bool) -> Schema:
    """A tool that is not strict and not forced is held to an object, no more."""
    if not tool.parameters:
        return _NO_ARGUMENTS
    return parts.read(tool.parameters, param) if forced or tool.strict else _ANY_OBJECT


def _rules(
    starts: Sequence[str],
    *,
    document: Schema | None = None,
    calls: Sequence[_Call] = (),
    form: ToolFormat | None = None,
    several: bool = False,
) -> str:
    lines = ["%llguidance {}", f"start: {' | '.join(starts)}"]
    if document is not None:
        lines.append(f"document: {_json(document)}")
    if form is not None:
        more = f" ({_text(form.between)} call)*" if several else ""
        before, after = form.around
        lines.append(f"calls: {_text(before)} call{more} {_text(after)}")
        lines.append(f"call: {_text(form.opening)} body {_text(form.closing)}")
        lines.append("body: " + " | ".join(f"body_{n}" for n in range(len(calls))))
        for n, one in enumerate(calls):
            if form.named:
                lines.append(f"body_{n}: {_text(one.name + form.named)} {_json(one.arguments)}")
                continue
            head = '{"name": ' + json.dumps(one.name) + f', "{form.arguments}": '
            lines.append(f'body_{n}: {_text(head)} {_json(one.arguments)} "}}"')
    if "FREE" in starts:  # text that is no call: does not begin as one
        lines.append(r"FREE: /([^{\[\s](.|\n)*)?/")
    if "text_with_calls" in starts and form is not None:
        lines.append("text_with_calls: called* TEXT")
        lines.append(r"TEXT: /(.|\n)*/")
        lines.append(f"head[lazy]: TEXT {_text(form.opening)}")
        lines.append(f"called: head body {_text(form.closing)}")
    return "\n".join(lines) + "\n"


def _either(calls: Sequence[_Call], document: Schema, form: ToolFormat) -> Schema:
    """A call or the document, for a form whose calls look like documents: as one schema, since
    only within one do texts that begin alike stay apart."""
    options: list[Schema] = []
    for n, one in enumerate(calls):
        place = f"#/anyOf/{n}/properties/{form.arguments}"
        members = {"name": {"const": one.name}, form.arguments: moved(one.arguments, place)}
        options.append(
            {
                "type": "object",
                "properties": members,
                "required": list(members),
                "additionalProperties": False,
            }
        )
    return {"anyOf": [*options, moved(document, f"#/anyOf/{len(options)}")]}


def _text(literal: str) -> str:
    return json.dumps(literal) if literal else ""


def _json(schema: Schema) -> str:
    return "%json " + json.dumps({"x-guidance": _BLANKS, **schema})


def _complaint(grammar: str, tokens: LLTokenizer) -> str:
    """Why no answer could be held to it with this vocabulary; "" if one can."""
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits())
    for step in range(_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        allowed = matcher.compute_bitmask()
        if matcher.is_error() and not step:
            return "nothing fits it"
        if not matcher.consume_token(_lowest(allowed)):
            break
    return matcher.get_error()


def _lowest(allowed: bytes) -> int:
    """The first token of a mask; its size, which no token has, when it allows none."""
    empty = len(allowed) - len(allowed.lstrip(b"\0"))
    byte = allowed[empty] if empty < len(allowed) else 1
    return empty * 8 + (byte & -byte).bit_length() - 1


def _blame(said: str, parts: _Parts) -> RequestError:
    """The refusal of the schema that is at fault; of the first, when none is by itself."""
    for param, schema in parts.found:
        failed, complaints = LLMatcher.validate_grammar_with_warnings(
            f"start: {_json(schema)}", limits=limits()
        )
        if failed:
            return _refusal(complaints[0], param)
    return _refusal(said, parts.found[0][0] if parts.found else "tools")


def _refusal(said: str, param: str) -> RequestError:
    """The engine's complaint without the grammar that it quotes, and with the keyword's name."""
    said = said.split("\n   1 | ")[0].replace("<non-verbose/>", "")
    while _PLACE.match(said):
        said = _PLACE.sub("", said, count=1)
    said = " ".join(said.split())[:300]
    if "items; max is" in said:
        said = (
            "it has too many ways on at one place: fewer optional properties or alternatives help"
        )
    for pattern, keyword in _NAMED:
        found = pattern.search(said)
        if found is None:
            continue
        if keyword is None:
            names = found[1].replace('"', "'")
            return UnsupportedField(
                f"'{param}': the keyword {names} cannot be enforced here", param=param
            )
        return InvalidRequest(f"'{param}': the keyword '{keyword}': {said}", param=param)
    return InvalidRequest(f"'{param}' cannot be enforced: {said}", param=param)
