"""A changed topology comes to a router that runs: other nodes, models, scales. Its sessions, its
queue and its answers go on; what only a new start can take is refused, and nothing has changed."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
from aiohttp import web

from core.config import Topology, World, load
from core.errors import ConfigError, InternalError, InvalidRequest, RequestError
from core.orders import TOPOLOGY_PATH, TopologyAsk

log = logging.getLogger("skerry.router")

CONFLICT = 409
SUFFIX = ".toml"


class TopologyHttp:
    """`world`: as the router was started. `take` goes on with another one, or changes nothing and
    raises ConfigError, RequestError or OSError. `check` raises the refusal of a caller without the
    secret."""

    def __init__(
        self,
        world: World,
        *,
        take: Callable[[World], Awaitable[None]],
        check: Callable[[web.Request], None],
    ) -> None:
        self._own = world.path
        self._state = world.state
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
                world = await asyncio.to_thread(self._read, ask.path)
                await self._take(world)
        except ConfigError as error:
            log.warning("topology refused: %s", error)
            return _refused(CONFLICT, "topology_refused", str(error))
        except (RequestError, OSError) as error:
            log.error("topology not taken: %s", error)
            named = error if isinstance(error, RequestError) else InternalError(str(error))
            return _refused(named.http_status, named.code, named.message)
        log.info("topology taken file=%s", world.path)
        return web.Response(status=204)

    def _read(self, asked: str) -> World:
        return load(beside(self._own, asked), state=self._state)


def beside(own: Path, asked: str) -> Path:
    """The file itself that `asked` leads to, where it is a topology in the folder of `own`. Raises
    ConfigError, which says the same whether or not there is anything anywhere else.

    Whoever has the region's secret names the file, and may live on another machine: no file of this
    one's is theirs to read. Who may write beside `own` could have changed `own` as well.
    """
    refused = ConfigError(
        "a running router reads no topology but a file of its own folder,"
        f" {own.parent}{os.sep}*{SUFFIX}"
    )
    try:
        path = Path(asked).resolve()
    except (OSError, ValueError, RuntimeError):  # a NUL, links in a circle
        raise refused from None
    if path.parent != own.parent or path.suffix != SUFFIX:
        raise refused
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except OSError:  # such as a name that is too long
        raise refused from None
    if not stat.S_ISREG(status.st_mode) or status.st_uid not in _owners(own):
        raise refused
    return path


def _owners(own: Path) -> set[int]:
    """Who may have written a topology: in a folder such as /tmp anybody may put a file, and none
    but these can change `own`."""
    there = (one.stat().st_uid for one in (own, own.parent) if one.exists())
    return {0, os.geteuid(), *there}


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
