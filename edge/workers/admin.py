"""The admin interface of an edge's Workers, on an address of its own, where `skerry worker` comes
in.

Every question needs the admin secret. Refusals are in the form of the rest of the API.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from core.errors import RequestError, SkerryError, Unauthorized, WorkerRefused
from edge.api.openai_render import error_body
from edge.workers.admin_pages import (
    BASE,
    Activate,
    EdgePage,
    Rows,
    Staged,
    StageKept,
    WorkerPage,
)
from edge.workers.bundle import MAX_BYTES, check_name, digest_of
from edge.workers.host import Host
from edge.workers.logs import Line

MAX_SECRET_BYTES = 8 << 10
MAX_LINES = 1000
_NAMED = f"{BASE}/workers/{{name}}"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Body = TypeVar("_Body", bound=msgspec.Struct)


def admin_app(
    host: Host, page: EdgePage, tenants: frozenset[str], secret: bytes
) -> web.Application:
    """`tenants`: who Workers may act for."""

    async def edge(request: web.Request) -> web.StreamResponse:
        return _json(page)

    async def listing(request: web.Request) -> web.StreamResponse:
        return _json(Rows(host.rows()))

    async def worker(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        row = host.row(name)
        card, kept = host.card(name)
        return _json(
            WorkerPage(
                worker=row,
                kept=tuple(kept),
                deployments=card.deployments,
                secrets=tuple(sorted(card.secrets)),
            )
        )

    async def stage(request: web.Request) -> web.StreamResponse:
        name, digest = request.match_info["name"], request.match_info["digest"]
        check_name(name)
        tenant = request.query.get("tenant", "")
        if tenant not in tenants:
            known = ", ".join(sorted(tenants)) or "none"
            raise WorkerRefused(f"no tenant is named {tenant!r} in this world; there are: {known}")
        data = await _read(request)
        if digest_of(data) != digest:
            raise WorkerRefused("the bundle came damaged: its digest is another one; deploy again")
        open_ = request.query.get("open") == "1"
        return _json(Staged(await host.stage(name, data, tenant=tenant, open_=open_)))

    async def stage_kept(request: web.Request) -> web.StreamResponse:
        asked = _decode(await _read(request), StageKept)
        return _json(Staged(await host.stage_kept(request.match_info["name"], asked.version)))

    async def discard(request: web.Request) -> web.StreamResponse:
        await host.discard(request.match_info["name"], request.match_info["version"])
        return web.Response(status=204)

    async def activate(request: web.Request) -> web.StreamResponse:
        asked = _decode(await _read(request), Activate)
        await host.activate(request.match_info["name"], asked.version, asked.how, asked.id)
        return web.Response(status=204)

    async def withdraw(request: web.Request) -> web.StreamResponse:
        named = request.match_info
        await host.withdraw(named["name"], named["version"], request.query.get("id", ""))
        return web.Response(status=204)

    async def delete(request: web.Request) -> web.StreamResponse:
        await host.delete(request.match_info["name"])
        return web.Response(status=204)

    async def put_secret(request: web.Request) -> web.StreamResponse:
        value = await _read(request)
        if len(value) > MAX_SECRET_BYTES:
            raise WorkerRefused(f"a secret has at most {MAX_SECRET_BYTES} bytes")
        try:
            text = value.decode()
        except UnicodeDecodeError as error:
            raise WorkerRefused("a secret is UTF-8 text") from error
        await host.set_secret(request.match_info["name"], request.match_info["key"], text)
        return web.Response(status=204)

    async def delete_secret(request: web.Request) -> web.StreamResponse:
        await host.set_secret(request.match_info["name"], request.match_info["key"], None)
        return web.Response(status=204)

    async def tail(request: web.Request) -> web.StreamResponse:
        book = host.book(request.match_info["name"])
        asked = request.query.get("lines", "0")
        lines = min(int(asked[:6]), MAX_LINES) if asked.isascii() and asked.isdigit() else 0
        answer = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await answer.prepare(request)
        await answer.write(b"".join(_line(one) for one in book.last(lines)))
        if request.query.get("follow", "1") == "1":
            async for line in book.follow():
                await answer.write(_line(line))
        return answer

    app = web.Application(client_max_size=MAX_BYTES + 1, middlewares=[_guard(secret)])
    app.router.add_get("/healthz", edge)
    app.router.add_get(f"{BASE}/edge", edge)
    app.router.add_get(f"{BASE}/workers", listing)
    app.router.add_get(_NAMED, worker)
    app.router.add_delete(_NAMED, delete)
    app.router.add_put(f"{_NAMED}/staged/{{digest}}", stage)
    app.router.add_post(f"{_NAMED}/staged", stage_kept)
    app.router.add_delete(f"{_NAMED}/staged/{{version}}", discard)
    app.router.add_post(f"{_NAMED}/active", activate)
    app.router.add_delete(f"{_NAMED}/active/{{version}}", withdraw)
    app.router.add_put(f"{_NAMED}/secrets/{{key}}", put_secret)
    app.router.add_delete(f"{_NAMED}/secrets/{{key}}", delete_secret)
    app.router.add_get(f"{_NAMED}/tail", tail)
    return app


def _guard(secret: bytes) -> Callable[..., Awaitable[web.StreamResponse]]:
    expected = b"Bearer " + secret

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path == "/healthz":
            return web.Response(text="ok\n")
        try:
            given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, expected):
                raise Unauthorized("the admin secret of this world is needed, as a bearer token")
            return await handler(request)
        except RequestError as error:
            return _refusal(error)
        except SkerryError as error:
            return _refusal(WorkerRefused(str(error)))

    return guard


def _refusal(error: RequestError) -> web.Response:
    return web.Response(
        status=error.http_status, body=error_body(error), content_type="application/json"
    )


async def _read(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise WorkerRefused(f"a bundle has at most {MAX_BYTES >> 20} MB") from None


def _decode(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        raise WorkerRefused(f"the body does not fit: {error}") from error


def _json(page: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(page), content_type="application/json")


def _line(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"
