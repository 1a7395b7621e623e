"""Pages for an edge's operator and for its own other workers: never for callers.

`/explain` answers on loopback, or to whoever has the region's secret; what a proxy passes on is
not from loopback. The pages under `/internal/v1` need the secret.
"""

from __future__ import annotations

import hmac
import re
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from core import metrics
from core.address import is_loopback
from core.errors import Forbidden, InvalidRequest, NotFound
from edge.crew.chorus import METRICS, STORIES, WORKER, Chorus

NEWEST, MOST = 20, 200
_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")

_Request = Request[Any, Any, Any]  # user, auth and state of the framework: none is used


def inside_handlers(chorus: Chorus, secret: bytes) -> list[HTTPRouteHandler]:
    @get("/explain")
    async def newest(request: _Request) -> Response[bytes]:
        _check_operator(request, secret)
        return _json(await chorus.stories(None, _newest(request)))

    @get("/explain/{name:str}")
    async def explain(request: _Request) -> Response[bytes]:
        _check_operator(request, secret)
        name = _id(str(request.path_params["name"]))
        page = await chorus.stories(name, 1)
        if not page.stories:
            raise NotFound(
                f"No request {name} is known here. Each worker of this edge keeps its last "
                f"{page.kept.requests} requests, for {page.kept.seconds / 60:g} minutes; another "
                "edge may have had it."
            )
        return _json(page)

    @get(METRICS)
    async def own_metrics(request: _Request) -> Response[bytes]:
        _check_secret(request, secret)
        return Response(chorus.own_metrics(), media_type=metrics.CONTENT_TYPE)

    @get(WORKER)
    async def own_worker(request: _Request) -> Response[bytes]:
        _check_secret(request, secret)
        return _json(chorus.own_worker())

    @get(STORIES)
    async def own_stories(request: _Request) -> Response[bytes]:
        _check_secret(request, secret)
        name = request.query_params.get("id")
        return _json(chorus.own_stories(None if name is None else _id(name), _newest(request)))

    return [newest, explain, own_metrics, own_worker, own_stories]


def _check_operator(request: _Request, secret: bytes) -> None:
    client = request.scope.get("client")
    near = client is not None and is_loopback(client[0])
    if not near or any(name in request.headers for name in _FORWARDED):
        _check_secret(request, secret)


def _check_secret(request: _Request, secret: bytes) -> None:
    given = request.headers.get("x-skerry-secret", "").encode("latin-1")
    if not hmac.compare_digest(given, secret):
        raise Forbidden("This page is for the operator: ask from loopback, or with the secret.")


def _id(name: str) -> str:
    if _ID.fullmatch(name) is None:
        raise InvalidRequest("This is no request's id: see the x-request-id of an answer.")
    return name


def _newest(request: _Request) -> int:
    given = request.query_params.get("newest", str(NEWEST))
    if not given.isascii() or not given.isdigit():
        raise InvalidRequest("'newest' is a number.", param="newest")
    return min(int(given[:6]), MOST)


def _json(page: msgspec.Struct) -> Response[bytes]:
    return Response(msgspec.json.encode(page), media_type="application/json")
