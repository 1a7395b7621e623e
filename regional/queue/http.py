"""How edges hand in batches and ask for them, behind the region's secret."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from core.batches import QUEUE_PATH, OwedPage, QueueReply, Submission, Written
from core.errors import (
    BodyTooLarge,
    InvalidRequest,
    NotFound,
    RegionUnavailable,
    RequestError,
    VersionSkew,
    to_fault,
)  # fmt: skip
from core.headers import WIRE_HEADER
from core.types import WIRE_VERSION
from regional.queue.kept import KeptQueue

_BYTES_PER_ITEM = 4096
"""What a request may weigh here beyond its JSON: our own fields, a seed, a chain of hashes."""
MAX_BODY_ITEMS = 1024

_decode = msgspec.msgpack.Decoder(Submission).decode
_decode_written = msgspec.msgpack.Decoder(Written).decode
_encode = msgspec.msgpack.Encoder().encode


class QueueHttp:
    """`check` raises the refusal of a caller without the secret; `poke` tells the worker. While
    `leaving`, batches are another region's."""

    def __init__(
        self,
        kept: KeptQueue,
        *,
        check: Callable[[web.Request], None],
        poke: Callable[[], None],
        body_bytes: int,
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._kept = kept
        self._check = check
        self._poke = poke
        self._leaving = leaving
        self._limit = body_bytes + MAX_BODY_ITEMS * _BYTES_PER_ITEM

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post(QUEUE_PATH, self._add),
            web.get(QUEUE_PATH, self._left),
            web.get(f"{QUEUE_PATH}/{{batch}}", self._state),
            web.get("/internal/v1/owed", self._owed),
            web.post("/internal/v1/owed", self._written),
        ]

    async def _add(self, http: web.Request) -> web.Response:
        self._check(http)
        try:
            _check_wire(http)
            batch = _submission(await self._body(http))
            if self._leaving():
                raise RegionUnavailable("the region is being taken out")
            reply: QueueReply = await self._kept.add(batch)
        except RequestError as error:
            reply = to_fault(error)
        self._poke()
        return _answer(reply)

    async def _state(self, http: web.Request) -> web.Response:
        self._check(http)
        try:
            _check_wire(http)
            state = await self._kept.state(*_named(http))
            reply: QueueReply = state or to_fault(NotFound("there is no such batch"))
        except RequestError as error:
            reply = to_fault(error)
        return _answer(reply)

    async def _left(self, http: web.Request) -> web.Response:
        self._check(http)
        try:
            left = await self._kept.left()
        except RequestError as error:
            raise web.HTTPServiceUnavailable(text=error.message) from error
        return web.Response(body=msgspec.json.encode(left), content_type="application/json")

    async def _owed(self, http: web.Request) -> web.Response:
        self._check(http)
        try:
            _check_wire(http)
            items = await self._kept.owed(_collector(http))
            reply: QueueReply = OwedPage(items=tuple(items))
        except RequestError as error:
            reply = to_fault(error)
        return _answer(reply)

    async def _written(self, http: web.Request) -> web.Response:
        self._check(http)
        try:
            _check_wire(http)
            told = _told(await self._body(http))
            fresh = await self._kept.written(_collector(http), told.request_ids)
            reply: QueueReply = Written(request_ids=tuple(fresh))
        except RequestError as error:
            reply = to_fault(error)
        return _answer(reply)

    async def _body(self, http: web.Request) -> bytes:
        pieces = bytearray()
        async for piece in http.content.iter_any():
            pieces += piece
            if len(pieces) > self._limit:
                raise BodyTooLarge(f"the batch is over {self._limit} bytes")
        return bytes(pieces)


def _submission(body: bytes) -> Submission:
    try:
        return _decode(body)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body is no batch: {error}") from error


def _told(body: bytes) -> Written:
    try:
        return _decode_written(body)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body names no requests: {error}") from error


def _collector(http: web.Request) -> str:
    name = http.query.get("collector", "")
    if not name:
        raise InvalidRequest("a collector has a name")
    return name


def _named(http: web.Request) -> tuple[str, str]:
    return http.match_info["batch"], http.query.get("namespace", "")


def _check_wire(http: web.Request) -> None:
    wire = http.headers.get(WIRE_HEADER)
    if wire != str(WIRE_VERSION):
        raise VersionSkew(f"the edge speaks wire {wire}, this router {WIRE_VERSION}")


def _answer(reply: QueueReply) -> web.Response:
    headers = {WIRE_HEADER: str(WIRE_VERSION)}
    return web.Response(body=_encode(reply), content_type="application/msgpack", headers=headers)
