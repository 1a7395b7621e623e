"""The store as workerd's KV bindings speak to it: a key is a path, a list is the root.

Who asks is said by the token of the Worker's process; which namespace it means, by the name of the
binding. Refusals are a status with its reason, which is what the Worker's exception says.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Protocol
from urllib.parse import parse_qsl, unquote

import msgspec
from aiohttp import web

from edge.workers.kv_store import KvStore, Pair, Space
from edge.workers.runtime import NAMESPACE_HEADER, TOKEN_HEADER

MAX_KEY_BYTES, MAX_VALUE_BYTES, MAX_METADATA_BYTES = 512, 25 << 20, 1024
MIN_TTL_S = 60
MAX_KEYS, MAX_BULK = 1000, 100
METADATA = "cf-kv-metadata"


class Spaces(Protocol):
    def space_of(self, token: str, binding: str) -> Space | None:
        """None where no Worker says that token, or it has no such binding."""
        ...


class _Refused(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class _Listed(msgspec.Struct, omit_defaults=True):
    name: str
    expiration: int | None = None
    metadata: str | None = None


class _List(msgspec.Struct):
    keys: list[_Listed]
    list_complete: bool
    cursor: str = ""


class _Bulk(msgspec.Struct):
    keys: list[str]
    type: str = "text"
    withMetadata: bool = False


def store_app(
    store: KvStore, spaces: Spaces, *, clock: Callable[[], float] = time.time
) -> web.Application:
    async def handle(request: web.Request) -> web.StreamResponse:
        space = spaces.space_of(
            request.headers.get(TOKEN_HEADER, ""), request.headers.get(NAMESPACE_HEADER, "")
        )
        if space is None:
            return web.Response(status=403, reason="No such namespace")
        try:
            return await _answer(store, space, request, clock)
        except _Refused as refusal:
            return web.Response(status=refusal.status, reason=refusal.reason)

    app = web.Application(client_max_size=MAX_VALUE_BYTES + 1)
    app.router.add_route("*", "/{rest:.*}", handle)
    return app


async def _answer(
    store: KvStore, space: Space, request: web.Request, clock: Callable[[], float]
) -> web.StreamResponse:
    path, _, query_text = request.raw_path.partition("?")
    query = dict(parse_qsl(query_text, keep_blank_values=True))
    if path == "/" and request.method == "GET":
        return _json(_list(store, space, query))
    if path == "/bulk/get" and request.method == "POST":
        return web.Response(
            body=_bulk(store, space, await request.read()), content_type="application/json"
        )
    key = unquote(path.removeprefix("/"))
    if not 0 < len(key.encode()) <= MAX_KEY_BYTES:
        raise _Refused(414, f"A key has 1 to {MAX_KEY_BYTES} bytes")
    if request.method == "GET":
        return _get(store, space, key)
    if request.method == "PUT":
        store.put(space, await _pair(request, key, query, clock()))
    elif request.method == "DELETE":
        store.delete(space, key)
    else:
        raise _Refused(405, "Method not allowed")
    return web.Response()


def _get(store: KvStore, space: Space, key: str) -> web.Response:
    pair = store.get(space, key)
    if pair is None:
        return web.Response(status=404, reason="Not Found")
    headers = {} if pair.metadata is None else {METADATA: pair.metadata}
    if pair.expires is not None:
        headers["expiration"] = str(pair.expires)
    return web.Response(body=pair.value, headers=headers)


async def _pair(request: web.Request, key: str, query: dict[str, str], now: float) -> Pair:
    expires: int | None = None
    if "expiration_ttl" in query:
        ttl = _number(query["expiration_ttl"], "expiration_ttl")
        if ttl < MIN_TTL_S:
            raise _Refused(
                400,
                f"Invalid expiration_ttl of {ttl}. Expiration TTL must be at least {MIN_TTL_S}.",
            )
        expires = int(now) + ttl
    elif "expiration" in query:
        expires = _number(query["expiration"], "expiration")
        if expires < now + MIN_TTL_S:
            raise _Refused(
                400,
                f"Invalid expiration of {expires}. Please specify integer greater than the current"
                f" number of seconds since the UNIX epoch by {MIN_TTL_S}.",
            )
    metadata = request.headers.get(METADATA)
    if metadata is not None and len(metadata.encode()) > MAX_METADATA_BYTES:
        raise _Refused(413, f"Metadata is over the limit of {MAX_METADATA_BYTES} bytes")
    try:
        value = await request.read()
    except web.HTTPRequestEntityTooLarge:
        await request.release()  # who still writes would lose the connection, and never read this
        raise _Refused(413, f"A value is over the limit of {MAX_VALUE_BYTES} bytes") from None
    return Pair(key, value, metadata, expires)


def _list(store: KvStore, space: Space, query: dict[str, str]) -> _List:
    limit = _number(query.get("key_count_limit", str(MAX_KEYS)), "limit")
    if not 1 <= limit <= MAX_KEYS:
        raise _Refused(400, f"Invalid key_count_limit of {limit}: it is from 1 to {MAX_KEYS}.")
    try:
        after = base64.b64decode(query.get("cursor", ""), b"-_", validate=True).decode()
    except ValueError:
        raise _Refused(400, "Invalid cursor") from None
    page = store.page(space, prefix=query.get("prefix", ""), after=after, limit=limit)
    keys = [_Listed(one.key, one.expires, one.metadata) for one in page.pairs]
    if page.after is None:
        return _List(keys, list_complete=True)
    return _List(keys, False, base64.urlsafe_b64encode(page.after.encode()).decode())


def _bulk(store: KvStore, space: Space, body: bytes) -> bytes:
    try:
        asked = msgspec.json.decode(body, type=_Bulk)
    except msgspec.MsgspecError as error:
        raise _Refused(400, f"Invalid bulk request: {error}") from error
    if len(asked.keys) > MAX_BULK:
        raise _Refused(400, f"You can request a maximum of {MAX_BULK} keys")
    if asked.type not in ("text", "json"):
        raise _Refused(400, f'"{asked.type[:20]}" is not a valid type. Use "json" or "text"')
    found: dict[str, object] = {}
    for key in asked.keys:
        pair = store.get(space, key)
        value = None if pair is None else _value(pair, asked.type)
        if asked.withMetadata:
            metadata = pair.metadata if pair is not None else None
            plain = msgspec.Raw((metadata or "null").encode())
            found[key] = None if pair is None else {"value": value, "metadata": plain}
        else:
            found[key] = value
    return msgspec.json.encode(found)


def _value(pair: Pair, kind: str) -> object:
    text = pair.value.decode("utf-8", "replace")
    if kind == "text":
        return text
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise _Refused(400, f"The value of a key is no JSON: {error}") from error
    return msgspec.Raw(text.encode())


def _number(text: str, what: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise _Refused(400, f"Invalid {what}")
    return int(text[:12])


def _json(page: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(page), content_type="application/json")
