"""A caller's JSON Schema: read, and refused by keyword where we could not hold an answer to it.

The grammar engine refuses most of what it cannot enforce by itself. Here is the rest: keywords that
it would pass over in silence, and settings of its own that a caller must not reach.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from core.errors import InvalidRequest, UnsupportedField

MAX_DEPTH = 48
"""Schemas within schemas."""

_ONE = ("additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains",
        "propertyNames", "unevaluatedItems", "unevaluatedProperties", "contentSchema")  # fmt: skip
_MANY = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_REFUSED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties", "dependentSchemas",
    "dependentRequired", "dependencies", "$dynamicRef", "$dynamicAnchor", "$recursiveRef",
    "$recursiveAnchor", "$anchor", "extends", "disallow", "divisibleBy", "x-guidance",
})  # fmt: skip
"""Keywords that mean something to a validator and cannot be enforced token by token here."""

Schema = dict[str, Any]
"""JSON of the caller's; looked at in this file and handed on to the grammar engine."""


def read_schema(text: str, param: str) -> Schema:
    """Raises InvalidRequest for what is no schema, UnsupportedField for what cannot be enforced."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"'{param}' is not JSON that can be read", param=param) from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"'{param}' is no JSON Schema: an object is", param=param)
    for found, depth in _walk(schema):
        if depth > MAX_DEPTH:
            raise UnsupportedField(
                f"'{param}': schemas are nested more than {MAX_DEPTH} deep", param=param
            )
        if found.get("uniqueItems") is False:
            del found["uniqueItems"]  # asks for nothing, and the engine knows no such keyword
        keyword = _unenforced(found)
        if keyword is not None:
            raise UnsupportedField(
                f"'{param}': the keyword {keyword!r} cannot be enforced here", param=param
            )
    return schema


def moved(schema: Schema, place: str) -> Schema:
    """`schema` as it reads when it stands at `place` ("#/anyOf/0") of another document."""
    copy: Schema = json.loads(json.dumps(schema))
    for found, _ in _walk(copy):
        target = found.get("$ref")
        if isinstance(target, str) and target.startswith("#"):
            found["$ref"] = place + target[1:]
    return copy


def _walk(schema: Schema) -> Iterator[tuple[Schema, int]]:
    """Every schema in `schema`, with its depth; stops at what is deeper than any may be."""
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    while waiting:
        found, depth = waiting.pop()
        if not isinstance(found, dict):
            continue
        yield found, depth
        inner = [found[key] for key in _ONE if key in found]
        for key in _MANY:
            if isinstance(found.get(key), list):
                inner += found[key]
        for key in _NAMED:
            if isinstance(found.get(key), dict):
                inner += found[key].values()
        waiting += [(one, depth + 1) for one in inner]


def _unenforced(schema: Schema) -> str | None:
    """The keyword in `schema` itself that we could not hold an answer to."""
    for keyword, value in schema.items():
        if keyword in _REFUSED:
            return keyword
        if keyword == "multipleOf" and not _exact(value):
            return keyword
        if keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            return keyword  # of an early draft, where it changed what its neighbour means
        if keyword == "items" and isinstance(value, list):
            return "items as a list"
    least = schema.get("minProperties")
    if isinstance(least, int) and least > max(1, _certain(schema)):
        return "minProperties"  # a key that comes twice would count twice
    return None


def _exact(step: object) -> bool:
    """Do validators, which count in binary fractions, agree on what is a multiple of it?"""
    return not isinstance(step, float) or (step * 1024).is_integer()


def _certain(schema: Schema) -> int:
    """How many different keys are there in any case."""
    required = schema.get("required")
    return len(set(map(str, required))) if isinstance(required, list) else 0
