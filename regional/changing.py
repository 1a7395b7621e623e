"""A changed topology comes to a router that runs: other nodes, models, scales. Its sessions, its
queue and its answers go on; what only a new start can take is refused, and nothing has changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
from aiohttp import web

from core.config import Topology, World, load
from core.errors import ConfigError, InvalidRequest
from core.orders import TOPOLOGY_PATH, TopologyAsk

log = logging.getLogger("skerry.router")

CONFLICT = 409


class TopologyHttp:
    """`take` goes on with a world, or raises ConfigError. `check` raises the refusal of a caller
    without the secret."""

    def __init__(
        self,
        state: Path,
        *,
        take: Callable[[World], Awaitable[None]],
        check: Callable[[web.Request], None],
    ) -> None:
        self._state = state
        self._take = take
        self._check = check
        self._turn = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [web.post(TOPOLOGY_PATH, self._given)]

    async def _given(self, http: web.Request) -> web.Response:
        self._check(http)
        try:
            ask = msgspec.json.decode(await http.read(), type=TopologyAsk)
        except msgspec.MsgspecError as error:
            return _refused(
                InvalidRequest.http_status, InvalidRequest.code, f"no topology is named: {error}"
            )
        try:
            async with self._turn:
                world = await asyncio.to_thread(load, Path(ask.path), state=self._state)
                await self._take(world)
        except ConfigError as error:
            log.warning("topology refused: %s", error)
            return _refused(CONFLICT, "topology_refused", str(error))
        log.info("topology taken file=%s", ask.path)
        return web.Response(status=204)


def only_at_start(before: Topology, after: Topology, router: str) -> Iterator[str]:
    """What of `after` the running router of that name cannot take in."""
    for part in ("secrets", "limits", "tls", "observe"):
        if getattr(before, part) != getattr(after, part):
            yield f"[{part}]"
    try:
        (was, door), (now, moved) = before.router(router), after.router(router)
    except ConfigError as error:
        yield str(error)
        return
    if (was.name, door) != (now.name, moved):
        yield f"the addresses of router {router}"


def _refused(status: int, code: str, message: str) -> web.Response:
    body = msgspec.json.encode({"error": {"code": code, "message": message}})
    return web.Response(status=status, body=body, content_type="application/json")
