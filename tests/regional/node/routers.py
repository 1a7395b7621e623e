"""A router without routing: takes nodes in over real gRPC and keeps what they say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from core.errors import RequestError
from core.tls import Credentials
from regional.pb import node_pb2 as pb
from regional.rpc import NodeSession, SessionServer, listen, server_options
from tests.regional.node.desk import Desk

SECRET = b"a-secret-of-sixteen-characters"


@dataclass
class Joined:
    """One node that has joined, and its desk."""

    session: NodeSession
    desk: Desk = field(default_factory=Desk)

    def say(self, message: pb.RouterMessage) -> None:
        self.session.send(message)


@dataclass
class FakeRouter:
    """See `regional.rpc.SessionOwner`. `refuse` answers every Join."""

    nodes: dict[str, Joined] = field(default_factory=dict)
    joins: list[pb.Join] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    refuse: RequestError | None = None
    address: str = ""
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def joined(self, session: NodeSession) -> None:
        self.joins.append(session.join)
        self._news.set()
        if self.refuse is not None:
            raise self.refuse
        self.nodes[session.name] = Joined(session)

    def received(self, session: NodeSession, message: pb.NodeMessage) -> None:
        self.nodes[session.name].desk.send(message)

    def ended(self, session: NodeSession) -> None:
        self.ends.append(session.name)
        known = self.nodes.get(session.name)
        if known is not None and known.session is session:
            del self.nodes[session.name]
        self._news.set()

    async def until(self, ready: Callable[[], bool], *, seconds: float = 30.0) -> None:
        async with asyncio.timeout(seconds):
            while not ready():
                self._news.clear()
                await self._news.wait()

    async def node(self, name: str) -> Joined:
        await self.until(lambda: name in self.nodes)
        return self.nodes[name]


@asynccontextmanager
async def fake_router(
    address: str = "127.0.0.1:0",
    *,
    secret: bytes = SECRET,
    heartbeat_s: float = 0.05,
    credentials: Credentials | None = None,
    router: FakeRouter | None = None,
) -> AsyncIterator[FakeRouter]:
    router = router or FakeRouter()
    sessions = SessionServer(router, secret=secret, heartbeat_s=heartbeat_s)
    server = grpc.aio.server(options=server_options())
    server.add_generic_rpc_handlers((sessions.handler(),))
    port = listen(server, address, credentials)
    router.address = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield router
    finally:
        sessions.close()
        await server.stop(0.5)
