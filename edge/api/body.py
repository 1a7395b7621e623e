"""Turns the JSON of a body into a struct or into a refusal with a name."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import TypeVar

import msgspec

from core.errors import IncompleteRequest, InvalidRequest
from core.nearest import did_you_mean

MAX_DEPTH = 128
"""Lists and objects inside one another. Whoever walks a body later may recurse so deep."""
MAX_CONTAINERS = 32_768
"""Lists and objects: messages, parts, calls, tools. More would hold up every stream of an edge."""

_T = TypeVar("_T")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.S)
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")
_HALF = re.compile(
    rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.S
)
"""Escapes in turn, so that a backslash that is escaped itself begins none."""
_WHERE = re.compile(r" - at `(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*)`$", re.S)
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`$", re.S)


def decode(kind: type[_T], body: bytes) -> _T:
    """Raises InvalidRequest, `param` naming the field where there is one."""
    if not body.strip():
        raise IncompleteRequest("the body is missing")
    check_shape(body)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {_half(body) or error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def _half(body: bytes) -> str:
    """About the first escape of one surrogate without the other, if there is one: a decoder may
    take it for a body that was cut."""
    for escape in _HALF.finditer(body):
        if half := escape["half"]:
            what = "is half a character: the other surrogate is missing"
            return f"{half.decode()} at byte {escape.start()} {what}"
    return ""


def check_shape(body: bytes) -> None:
    """Raises InvalidRequest for JSON that would take too long to walk: too deep, or too many
    lists and objects. Costs 3 ns a byte, where there is more than a handful of them."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    steps = _STRING.sub(b"", body).translate(_STEPS, _NO_BRACKET)
    if steps.count(b"\x01") > MAX_CONTAINERS:
        raise InvalidRequest(f"the body holds more than {MAX_CONTAINERS} lists and objects")
    if max(accumulate(memoryview(steps).cast("b")), default=0) > MAX_DEPTH:
        raise InvalidRequest(f"the body is nested more than {MAX_DEPTH} deep")


def _explain(complaint: str, body: type[object]) -> InvalidRequest:
    where = _WHERE.search(complaint)
    what = complaint[: where.start()] if where else complaint
    path = where["path"].removeprefix("$").removeprefix(".") if where else ""
    path = path.removesuffix("[...]").removeprefix("key in ")  # of a map: its field is named
    inside = f"{path}." if path else ""
    if unknown := _UNKNOWN.match(what):
        field = unknown["field"][:100]
        hint = did_you_mean(field, _fields_at(body, path), "")
        return InvalidRequest(
            f"Unrecognized request argument supplied: {inside}{field}"
            + (f"; {hint}" if hint else "."),
            param=inside + field,
        )
    if missing := _MISSING.match(what):
        field = missing["field"]
        return InvalidRequest(f"'{inside}{field}' is required.", param=inside + field)
    if not path:
        return InvalidRequest(f"the body does not fit: {what[0].lower()}{what[1:]}")
    return InvalidRequest(f"'{path}': {what[0].lower()}{what[1:]}", param=path)


def _fields_at(body: type[object], path: str) -> list[str]:
    """Names of the fields of the struct that `path` ("messages[0].tool_calls[1]") leads to."""
    kind: msgspec.inspect.Type = msgspec.inspect.type_info(body)
    for step in re.findall(r"[^.\[\]]+", path):
        kind = _step(kind, step)
    found = _member(kind, msgspec.inspect.StructType)
    return [field.encode_name for field in found.fields] if found else []


def _step(kind: msgspec.inspect.Type, step: str) -> msgspec.inspect.Type:
    struct = _member(kind, msgspec.inspect.StructType)
    if struct is not None:
        for field in struct.fields:
            if field.encode_name == step:
                return field.type
    items = _member(kind, msgspec.inspect.ListType)
    return items.item_type if items is not None else kind


_K = TypeVar("_K", bound=msgspec.inspect.Type)


def _member(kind: msgspec.inspect.Type, wanted: type[_K]) -> _K | None:
    members = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return next((member for member in members if isinstance(member, wanted)), None)
