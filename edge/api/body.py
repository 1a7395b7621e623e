"""Reads a request body under a limit; turns JSON into a struct or into a refusal with a name."""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Mapping
from typing import TypeVar, cast

import msgspec
from litestar.types import HTTPReceiveMessage, Receive

from core.errors import BodyTooLarge, Cancelled, InvalidRequest

BODY_S = 60.0
"""A body must be there within this; a peer that sends nothing holds no memory for longer."""
_LINGER_S, _LINGER_BYTES = 2.0, 256 << 20

_T = TypeVar("_T")
_WHERE = re.compile(r" - at `(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*)`$", re.S)
_MISSING = re.compile(r"^Object missing required field `(?P<field>.*)`$", re.S)


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """The whole body. The limit counts bytes that came, whatever the headers promise (B11).

    Raises BodyTooLarge as soon as it is crossed, Cancelled when the caller leaves before the end.
    """
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    pieces = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = cast("HTTPReceiveMessage", await receive())
                if message["type"] == "http.disconnect":
                    raise Cancelled("the caller left before the body was complete")
                pieces += message["body"]
                if len(pieces) > limit:
                    raise _too_large(limit)
                if not message["more_body"]:
                    return bytes(pieces)
    except TimeoutError as error:
        raise InvalidRequest(f"the body was not complete within {BODY_S:g} s") from error


async def drain_body(receive: Receive) -> None:
    """Throw away what a caller still sends after a refusal, for a while.

    Closing with unread bytes resets the connection, which can eat the answer on its way.
    """
    seen = 0
    try:
        async with asyncio.timeout(_LINGER_S):
            while seen < _LINGER_BYTES:
                message = cast("HTTPReceiveMessage", await receive())
                if message["type"] == "http.disconnect" or not message["more_body"]:
                    return
                seen += len(message["body"])
    except TimeoutError:
        return  # long enough; the connection is closed on what is left


def decode(kind: type[_T], body: bytes) -> _T:
    """Raises InvalidRequest, `param` naming the field where there is one."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def nearest(word: str, known: list[str]) -> str:
    """` Did you mean …?` or nothing, to end a sentence with."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def _explain(complaint: str, body: type[object]) -> InvalidRequest:
    where = _WHERE.search(complaint)
    what = complaint[: where.start()] if where else complaint
    path = where["path"].removeprefix("$").removeprefix(".") if where else ""
    path = path.removesuffix("[...]").removeprefix("key in ")  # of a map: its field is named
    inside = f"{path}." if path else ""
    if unknown := _UNKNOWN.match(what):
        field = unknown["field"][:100]
        hint = nearest(field, _fields_at(body, path))
        return InvalidRequest(
            f"Unrecognized request argument supplied: {inside}{field}.{hint}",
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


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is over the limit of {limit} bytes")
