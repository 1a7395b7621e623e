"""What stands before an edge's own routes: requests that are for a Worker go to it.

By a route's pattern, by a host `NAME.domain`, or under `/w/NAME/` of any other host: what is under
a Worker's own host is its alone. All else is the edge's.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from litestar.enums import ScopeType
from litestar.types import HTTPScope, Receive, Scope, Send

from core.errors import NotFound
from edge.workers.proxy import Passage, Upstream, refuse
from edge.workers.table import Entry, Table
from edge.workers.turning_away import resting
from edge.workers.upload import Upload

if TYPE_CHECKING:
    from litestar.types import ASGIApp

PREFIX = "/w/"
ABSENT_S, LOOK_S = 5.0, 0.05
"""How long a Worker that is in the table may be without its host, and how often it is tried."""


class Front:
    """`app` answers what is for no Worker."""

    def __init__(self, app: ASGIApp, edge: str, table: Table) -> None:
        self._app = app
        self._edge = edge
        self._table = table
        self._upstreams: dict[str, Upstream] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        host = next((value for name, value in scope["headers"] if name == b"host"), b"")
        entry = self._table.of_host(host.decode("latin-1"), path)
        if entry is not None:
            await self._pass(entry, scope, receive, send, path=scope["raw_path"], shared=False)
        elif path.startswith(PREFIX):
            await self._by_path(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def close(self) -> None:
        for upstream in self._upstreams.values():
            await upstream.close()

    async def _by_path(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        name, slash, rest = scope["raw_path"].removeprefix(PREFIX.encode()).partition(b"/")
        entry = self._table.named(name.decode("latin-1"))
        if entry is None or not entry.by_name:
            shown = name.decode("latin-1")[:63]
            await refuse(send, NotFound(f"No Worker is named {shown!r} here."))
            return
        if not slash:  # what a Worker's page refers to lies beside it
            location = scope["raw_path"] + b"/"
            if scope["query_string"]:
                location += b"?" + scope["query_string"]
            headers = [(b"location", location), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 308, "headers": headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        await self._pass(entry, scope, receive, send, path=b"/" + rest, shared=True)

    async def _pass(
        self,
        entry: Entry,
        scope: HTTPScope,
        receive: Receive,
        send: Send,
        *,
        path: bytes,
        shared: bool,
    ) -> None:
        """Where nobody listens, its host is being started again: what it serves then is waited
        for."""
        loop = asyncio.get_running_loop()
        upload, end = Upload(receive, scope["headers"]), loop.time() + ABSENT_S
        while True:
            if entry.rest is not None and entry.rest.left_s(time.time()) > 0:
                await refuse(send, resting(entry.name, entry.rest))
                return
            passage = await self._passage(entry, path, shared=shared)
            if await passage(scope, upload, send):
                return
            if loop.time() > end:
                await refuse(send, passage.absent())
                return
            await asyncio.sleep(LOOK_S)
            entry = self._table.named(entry.name) or entry

    async def _passage(self, entry: Entry, path: bytes, *, shared: bool) -> Passage:
        upstream = self._upstreams.get(entry.name)
        if upstream is None or upstream.entry != entry:
            stale, upstream = upstream, Upstream(entry)
            self._upstreams[entry.name] = upstream
            if stale is not None:
                stale.retired = True
                if not stale.running:
                    await stale.close()
        return Passage(self._edge, upstream, path=path, shared=shared)
