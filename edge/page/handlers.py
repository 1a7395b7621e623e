"""The routes of the page. Its files are for everybody; what it shows is for whoever is at the
machine, has the operator's secret, or, of the world alone, has a key."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import HttpMethod, Request, Response, get, route
from litestar.handlers import HTTPRouteHandler

from core.config import Topology
from core.errors import NotFound, Unauthorized
from edge.api.inside import story_page
from edge.api.operator import check_operator, has_secret, is_near
from edge.api.status_page import FrontPage, Outlook
from edge.crew.chorus import Chorus
from edge.page.files import FRONT, File, give, wants_page
from edge.page.neighbours import Neighbours
from edge.page.world import Rows, row, story_card, world_page
from edge.tenants.door import NO_KEY, Door

SHOWN = 50
"""Requests in the list."""

_Request = Request[Any, Any, Any]  # user, auth and state of the framework: none is used


def page_handlers(
    files: dict[str, File],
    *,
    topology: Topology,
    outlook: Outlook,
    chorus: Chorus,
    door: Door,
    neighbours: Neighbours,
    version: str,
    secret: bytes,
) -> list[HTTPRouteHandler]:
    @route("/", http_method=[HttpMethod.GET, HttpMethod.HEAD])
    async def front(request: _Request) -> Response[bytes]:
        if wants_page(request.headers.get("accept", "")):
            return _file(request, files[FRONT])
        return _json(FrontPage(), vary="accept")

    @get("/page/{name:str}")
    async def file(request: _Request) -> Response[bytes]:
        name = str(request.path_params["name"])
        if name not in files:
            raise NotFound(f"The page has no file {name[:100]!r}.")
        return _file(request, files[name])

    @get("/page/world")
    async def world(request: _Request) -> Response[bytes]:
        near = is_near(request)
        if not near and not has_secret(request, secret):
            _check_key(request, door)
        page = outlook.status(
            version=version, uptime_s=chorus.uptime_s, workers=await chorus.workers()
        )
        return _json(
            world_page(
                topology,
                page,
                outlook.statuses(),
                await neighbours.cards(),
                near=near,
                needs_key=door.needs_key,
            )
        )

    @get("/page/requests")
    async def requests(request: _Request) -> Response[bytes]:
        check_operator(request, secret)
        told = await chorus.stories(None, SHOWN)
        return _json(Rows(rows=[row(story) for story in told.stories]))

    @get("/page/requests/{name:str}")
    async def one(request: _Request) -> Response[bytes]:
        check_operator(request, secret)
        told = await story_page(chorus, str(request.path_params["name"]))
        return _json(story_card(told.stories[0]))

    return [front, file, world, requests, one]


def _check_key(request: _Request, door: Door) -> None:
    """A key of ours, also where callers need none: this is no question to a model."""
    if door.authenticate(dict(request.scope["headers"])).key_id == NO_KEY:
        raise Unauthorized("From another machine this page wants an API key.")


def _file(request: _Request, file: File) -> Response[bytes]:
    given = give(
        file,
        encodings=request.headers.get("accept-encoding", ""),
        known=request.headers.get("if-none-match", ""),
    )
    return Response(
        given.body,
        media_type=given.kind,
        status_code=given.status,
        headers=dict(given.headers),
    )


def _json(page: msgspec.Struct, vary: str = "authorization") -> Response[bytes]:
    headers = {"cache-control": "no-store", "vary": vary}
    return Response(msgspec.json.encode(page), media_type="application/json", headers=headers)
