"""`POST /internal/v1/orders`: the operator lets an edge rest, or work again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler

from core.errors import InvalidRequest
from core.orders import ORDERS_PATH, OrderAsk, Orders, read_orders, write_orders
from edge.api.operator import check_secret
from edge.crew.chorus import OWN_ORDERS, Chorus

_T = TypeVar("_T", bound=msgspec.Struct)
_Request = Request[Any, Any, Any]  # user, auth and state of the framework: none is used


def orders_handlers(chorus: Chorus, kept: Path, secret: bytes) -> list[HTTPRouteHandler]:
    """`kept`: the file that keeps them over starts."""

    @get(ORDERS_PATH)
    async def told(request: _Request) -> Response[bytes]:
        check_secret(request, secret)
        return _json(read_orders(kept))

    @post(ORDERS_PATH, status_code=200)
    async def given(request: _Request) -> Response[bytes]:
        check_secret(request, secret)
        ask = _decoded(await request.body(), OrderAsk)
        if ask.nodes or ask.weight is not None:
            raise InvalidRequest("An edge has neither nodes nor a weight.")
        orders = read_orders(kept).changed(ask)
        write_orders(kept, orders)
        await chorus.rest_all(msgspec.json.encode(orders), orders.resting)
        return _json(orders)

    @post(OWN_ORDERS, status_code=200)
    async def own(request: _Request) -> Response[bytes]:
        check_secret(request, secret)
        orders = _decoded(await request.body(), Orders)
        chorus.rest(orders.resting)
        return _json(orders)

    return [told, given, own]


def _decoded(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"The body is no order: {error}.") from error


def _json(page: msgspec.Struct) -> Response[bytes]:
    return Response(msgspec.json.encode(page), media_type="application/json")
