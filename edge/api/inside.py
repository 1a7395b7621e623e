"""Pages for an edge's operator and for its own other workers: never for callers.

`/explain` answers the operator (`edge.api.operator`). The pages under `/internal/v1` need the
secret.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from core import metrics
from core.errors import InvalidRequest, NotFound
from core.story import StoryPage
from edge.api.operator import check_operator, check_secret
from edge.crew.chorus import METRICS, STORIES, WORKER, Chorus

NEWEST, MOST = 20, 200
_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")

_Request = Request[Any, Any, Any]  # user, auth and state of the framework: none is used


def inside_handlers(chorus: Chorus, secret: bytes) -> list[HTTPRouteHandler]:
    @get("/explain")
    async def newest(request: _Request) -> Response[bytes]:
        check_operator(request, secret)
        return _json(await chorus.stories(None, _newest(request)))

    @get("/explain/{name:str}")
    async def explain(request: _Request) -> Response[bytes]:
        check_operator(request, secret)
        return _json(await story_page(chorus, str(request.path_params["name"])))

    @get(METRICS)
    async def own_metrics(request: _Request) -> Response[bytes]:
        check_secret(request, secret)
        return Response(chorus.own_metrics(), media_type=metrics.CONTENT_TYPE)

    @get(WORKER)
    async def own_worker(request: _Request) -> Response[bytes]:
        check_secret(request, secret)
        return _json(chorus.own_worker())

    @get(STORIES)
    async def own_stories(request: _Request) -> Response[bytes]:
        check_secret(request, secret)
        name = request.query_params.get("id")
        return _json(chorus.own_stories(None if name is None else _id(name), _newest(request)))

    return [newest, explain, own_metrics, own_worker, own_stories]


async def story_page(chorus: Chorus, name: str) -> StoryPage:
    """With the one story of the request `name`. Raises InvalidRequest, NotFound."""
    page = await chorus.stories(_id(name), 1)
    if not page.stories:
        raise NotFound(
            f"No request {name} is known here. Each worker of this edge keeps its last "
            f"{page.kept.requests} requests, for {page.kept.seconds / 60:g} minutes; another "
            "edge may have had it."
        )
    return page


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
