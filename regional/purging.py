"""A namespace leaves a region: what runs for it, its queue, and every node's memory and disk."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web

from core.errors import InvalidRequest, RequestError
from core.purge import PURGE_PATH, NodePurged, PurgeAsk, RegionPurged
from regional.pb import node_pb2 as pb
from regional.queue.kept import KeptQueue
from regional.rpc import NodeSession

log = logging.getLogger("skerry.router")

NODE_S = 60.0
"""A node that has said nothing by then may have something left."""


class Purges:
    """What nodes are asked and answer. `sessions` are those of the nodes that are joined now."""

    def __init__(self, sessions: Callable[[], Iterable[NodeSession]]) -> None:
        self._sessions = sessions
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[int, str], asyncio.Future[pb.Purged]] = {}
        """By the session's serial and the purge's id."""

    async def everywhere(self, namespace: str) -> tuple[NodePurged, ...]:
        """All nodes at once; one that does not answer is named in its line."""
        return tuple(
            await asyncio.gather(*(self._ask(one, namespace) for one in tuple(self._sessions())))
        )

    def heard(self, session: NodeSession, message: pb.Purged) -> None:
        waiting = self._waiting.get((session.serial, message.id))
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def _ask(self, session: NodeSession, namespace: str) -> NodePurged:
        purge_id = str(next(self._numbers))
        answer: asyncio.Future[pb.Purged] = asyncio.get_running_loop().create_future()
        self._waiting[session.serial, purge_id] = answer
        ended = asyncio.create_task(session.wait_ended())
        purge = pb.Purge(id=purge_id, namespace=namespace)
        session.send(pb.RouterMessage(purge=purge))
        try:
            either: set[asyncio.Future[Any]] = {answer, ended}
            await asyncio.wait(either, timeout=NODE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._waiting[session.serial, purge_id]
            ended.cancel()
        if not answer.done():
            why = "it was lost" if session.ended else f"no answer in {NODE_S:g} s"
            return NodePurged(node=session.name, error=why)
        said = answer.result()
        return NodePurged(
            node=session.name,
            error=said.error,
            requests=said.requests,
            cached_blocks=said.cached_blocks,
            scrubbed_blocks=said.scrubbed_blocks,
            host_blocks=said.host_blocks,
            disk_blocks=said.disk_blocks,
        )


class PurgeHttp:
    """`check` raises the refusal of a caller without the secret; `stop` ends the router's own
    requests of a namespace and says how many those were."""

    def __init__(
        self,
        purges: Purges,
        kept: KeptQueue,
        *,
        stop: Callable[[str], int],
        check: Callable[[web.Request], None],
    ) -> None:
        self._purges = purges
        self._kept = kept
        self._stop = stop
        self._check = check

    def routes(self) -> list[web.RouteDef]:
        return [web.post(PURGE_PATH, self._purge)]

    async def _purge(self, http: web.Request) -> web.Response:
        self._check(http)
        try:
            ask = msgspec.json.decode(await http.read(), type=PurgeAsk)
        except msgspec.MsgspecError as error:
            return _refused(InvalidRequest(f"the body names no namespace: {error}"))
        try:
            # The queue first: what it still had could be sent to a node behind the purge.
            batches = await self._kept.purge(ask.namespace)
        except RequestError as error:
            return _refused(error)
        requests = self._stop(ask.namespace)
        nodes = await self._purges.everywhere(ask.namespace)
        log.info("a namespace was purged: %d batches, %d requests", batches, requests)
        done = RegionPurged(batches=batches, requests=requests, nodes=nodes)
        return web.Response(body=msgspec.json.encode(done), content_type="application/json")


def _refused(error: RequestError) -> web.Response:
    body = msgspec.json.encode({"error": {"code": error.code, "message": error.message}})
    return web.Response(status=error.http_status, body=body, content_type="application/json")
