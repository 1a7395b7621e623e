"""A Python Worker as its own process, with what surrounds it as fakes or in memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from core.config_workers import Workers
from edge.workers.bundle import Bundle, Kv, Module, Service, Settings
from edge.workers.kv_http import store_app
from edge.workers.kv_store import KvStore, Space
from edge.workers.logs import Line, LogBook
from edge.workers.pacer import Pacer
from edge.workers.python.egress import open_egress
from edge.workers.python.runtime import PythonRuntime
from edge.workers.runtime import Seat
from edge.workers.unit import Unit

TOKEN, MARK = "a-token", "a-mark"


@dataclass
class Around:
    """`asked`: what reached the fake edge, as (path, headers, body)."""

    unit: Unit
    http: httpx.AsyncClient
    book: LogBook
    asked: list[tuple[str, Mapping[str, str], bytes]] = field(default_factory=list)

    def lines(self, level: str) -> list[Line]:
        return [line for line in self.book.last(1000) if line.level == level]


class OneSpace:
    """Every binding is a namespace of the one Worker."""

    def space_of(self, token: str, binding: str) -> Space | None:
        return Space("harbour", binding) if token == TOKEN else None


def bundle(code: str, **settings: object) -> Bundle:
    given = Settings(
        name="pilot",
        language="python",
        compatibility_date="2025-10-08",
        vars=(("GREETING", msgspec.json.encode("ahoy").decode()),),
        ai="AI",
        kv=(Kv("NOTES", "notes"),),
        services=(Service("OTHER", "other"),),
        **settings,  # type: ignore[arg-type]  # fields of Settings
    )
    return Bundle(settings=given, modules=(Module("entry.py", "python", code.encode()),))


@asynccontextmanager
async def running(
    code: str,
    edge: web.Application | None = None,
    *,
    limits: Workers | None = None,
    trusted: bool = False,
) -> AsyncIterator[Around]:
    """Raises WorkerRefused where it does not start."""
    limits = limits or Workers(memory_mb=64, turn_s=1.0)
    asked: list[tuple[str, Mapping[str, str], bytes]] = []

    @web.middleware
    async def noted(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked.append((request.path_qs, dict(request.headers), await request.read()))
        return await handler(request)

    app = web.Application(middlewares=[noted])
    if edge is not None:
        app.add_subapp("/client", edge)
    with tempfile.TemporaryDirectory(prefix="skw-", dir="/tmp") as folder:
        root = Path(folder)
        book = LogBook(clock=time.time)
        store = KvStore(root / "kv.sqlite")
        async with (
            open_egress() as egress,
            _serving(app, None) as address,
            _serving(store_app(store, OneSpace()), root / "store"),
            _serving(_other(), root / "other"),
        ):

            def seat(folder: Path, listener: int, control: Path) -> Seat:
                return Seat(
                    name="pilot",
                    folder=folder,
                    listener=listener,
                    control=control,
                    edge=address,
                    store=root / "store",
                    token=TOKEN,
                    mark=MARK,
                    limits=limits,
                    secrets={"PASSWORD": "a-secret"},
                    services={"OTHER": root / "other"},
                )

            unit = Unit(
                version="v1",
                tenant="t",
                bundle=bundle(code),
                runtime=PythonRuntime(egress, trusted=trusted),
                book=book,
                limits=limits,
                root=root,
                serial=1,
                seat=seat,
                changed=lambda: None,
                pacer=Pacer(),
            )
            try:
                await unit.start()
                transport = httpx.AsyncHTTPTransport(uds=str(unit.socket))
                async with httpx.AsyncClient(
                    transport=transport, base_url="http://pilot.localhost", timeout=60
                ) as http:
                    yield Around(unit, http, book, asked)
            finally:
                await unit.close(1.0)
                store.close()


def _other() -> web.Application:
    async def handle(request: web.Request) -> web.Response:
        told = {"path": request.path_qs, "host": request.host, "body": await request.text(),
                "token": request.headers.get("x-skerry-worker")}  # fmt: skip
        return web.json_response(told)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handle)
    return app


@asynccontextmanager
async def _serving(app: web.Application, path: Path | None) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        if path is None:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"127.0.0.1:{runner.addresses[0][1]}"
        else:
            await web.UnixSite(runner, str(path)).start()
            yield str(path)
    finally:
        await runner.cleanup()
