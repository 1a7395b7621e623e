"""The gRPC session between a router and its nodes: names, limits, and the router's end of it.

No generated service code: the method is one stream of `NodeMessage` against one of
`RouterMessage`. A node front dials with `SESSION_METHOD`, the two codecs below and
`channel_options()`; the router serves `SessionServer`. Message limits and keepalive of both ends
come from here, so that they cannot disagree: a client that pings more often than its server
allows is sent away, and a limit that only one end raised fails the other's messages.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from core.errors import ConfigError, Draining, Forbidden, InvalidRequest, RequestError, VersionSkew
from core.tls import Credentials
from core.types import WIRE_VERSION, NodeName
from regional.pb import node_pb2 as pb

log = logging.getLogger("skerry.rpc")

SERVICE = "skerry.node.v1.Region"
SESSION_METHOD = f"/{SERVICE}/Session"
MAX_MESSAGE_BYTES = 64 << 20
JOIN_TIMEOUT_S = 10.0
"""A stream that has not said Join by then is closed."""
_SHOWN = 64
"""Characters of a stranger's words that a log line quotes."""
MAX_UNSENT = 10_000
"""Messages that may wait for a node that does not read; one more and it is lost."""

encode_node_message: Callable[[pb.NodeMessage], bytes] = pb.NodeMessage.SerializeToString
decode_node_message: Callable[[bytes], pb.NodeMessage] = pb.NodeMessage.FromString
encode_router_message: Callable[[pb.RouterMessage], bytes] = pb.RouterMessage.SerializeToString
decode_router_message: Callable[[bytes], pb.RouterMessage] = pb.RouterMessage.FromString

Options = list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Keepalive:
    """How an idle connection is proved alive. The server's floor is derived from the same number
    that the client pings by, at half of it, which leaves room for timers that fire early."""

    interval_s: float = 20.0
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if self.interval_s < 1 or self.timeout_s <= 0:
            raise ConfigError(
                "keepalive: interval of at least 1 s and a timeout above 0 are needed"
            )

    @property
    def floor_s(self) -> float:
        """The server calls a client that pings more often than this abusive."""
        return self.interval_s / 2


def channel_options(keepalive: Keepalive | None = None) -> Options:
    """For the node's channel."""
    return [
        *_common(keepalive or Keepalive()),
        ("grpc.enable_http_proxy", 0),  # a region's nodes are never behind the caller's proxy
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),  # back within 5 s of a restarted router
    ]


def server_options(keepalive: Keepalive | None = None) -> Options:
    """For the router's `grpc.aio.server`."""
    alive = keepalive or Keepalive()
    return [
        *_common(alive),
        ("grpc.http2.min_ping_interval_without_data_ms", int(alive.floor_s * 1000)),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a shared port
    ]


def _common(keepalive: Keepalive) -> Options:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", int(keepalive.interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive.timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # 0: no limit
    ]


class NodeSession:
    """One node that has joined, over one stream. `serial` is unique within the router's life: a
    node that dials again gets a new session, and nothing of the old one applies to it."""

    def __init__(self, join: pb.Join, serial: int) -> None:
        self.join = join
        self.name = NodeName(join.name)
        self.serial = serial
        self.end_reason: str | None = None
        self._outgoing: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()
        self._ended = asyncio.Event()

    def send(self, message: pb.RouterMessage) -> None:
        """Queue `message`; dropped once the session has ended, as whoever waits for an answer
        hears of that end anyway."""
        if self._ended.is_set():
            return
        if self._outgoing.qsize() >= MAX_UNSENT:
            self.end("the node does not read its messages")
            return
        self._outgoing.put_nowait(message)

    def end(self, reason: str) -> None:
        """Close the stream from the router's side. Idempotent; the first reason stays."""
        if not self._ended.is_set():
            self.end_reason = reason
            self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def next_outgoing(self) -> pb.RouterMessage:
        return await self._outgoing.get()

    async def wait_ended(self) -> None:
        await self._ended.wait()


class SessionOwner(Protocol):
    """Who hears about sessions; called on the event loop, must not block."""

    def joined(self, session: NodeSession) -> None:
        """Take the node in. Raises a RequestError, which the node is told, to refuse it."""
        ...

    def received(self, session: NodeSession, message: pb.NodeMessage) -> None: ...

    def ended(self, session: NodeSession) -> None:
        """The stream is gone, whatever the reason. Called once for each session taken in."""
        ...


class SessionServer:
    """Serves the Session method: checks the Join, then shuttles messages until either end stops."""

    def __init__(self, owner: SessionOwner, *, secret: bytes, heartbeat_s: float) -> None:
        self._owner = owner
        self._secret = secret
        self._heartbeat_s = heartbeat_s
        self._serials = itertools.count(1)
        self._sessions: set[NodeSession] = set()
        self._closing = False

    def handler(self) -> grpc.GenericRpcHandler:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes."""
        method = grpc.stream_stream_rpc_method_handler(
            self._session,
            request_deserializer=decode_node_message,
            response_serializer=encode_router_message,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Session": method})

    def close(self) -> None:
        """End every session and refuse new ones."""
        self._closing = True
        for session in tuple(self._sessions):
            session.end("the router stops")

    async def _session(
        self,
        _requests: object,  # the stream is read through the context
        context: grpc.aio.ServicerContext[pb.NodeMessage, pb.RouterMessage],
    ) -> None:
        try:
            session = await self._take_in(context)
        except RequestError as error:
            rejected = pb.Rejected(code=error.code, message=error.message)
            await context.write(pb.RouterMessage(rejected=rejected))
            return
        self._sessions.add(session)
        try:
            await self._shuttle(session, context)
        finally:
            session.end("the stream ended")
            self._sessions.discard(session)
            self._owner.ended(session)
        await context.abort(grpc.StatusCode.UNAVAILABLE, session.end_reason or "")

    async def _take_in(
        self, context: grpc.aio.ServicerContext[pb.NodeMessage, pb.RouterMessage]
    ) -> NodeSession:
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                first = await context.read()
        except TimeoutError:
            raise InvalidRequest("no Join came in time") from None
        join = self._checked(first)
        session = NodeSession(join, next(self._serials))
        welcome = pb.Welcome(wire=WIRE_VERSION, heartbeat_s=self._heartbeat_s)
        session.send(pb.RouterMessage(welcome=welcome))
        self._owner.joined(session)
        return session

    def _checked(self, first: object) -> pb.Join:
        if not isinstance(first, pb.NodeMessage) or first.WhichOneof("body") != "join":
            raise InvalidRequest("the first message of a session must be Join")
        join = first.join
        if not hmac.compare_digest(join.secret.encode(), self._secret):
            log.warning("a node that calls itself %r came with a wrong secret", join.name[:_SHOWN])
            raise Forbidden("the region's secret does not match")
        if join.wire != WIRE_VERSION:
            raise VersionSkew(f"node speaks wire {join.wire}, this router {WIRE_VERSION}")
        if self._closing:
            raise Draining("the router stops")
        return join

    async def _shuttle(
        self,
        session: NodeSession,
        context: grpc.aio.ServicerContext[pb.NodeMessage, pb.RouterMessage],
    ) -> None:
        async def read() -> None:
            while isinstance(message := await context.read(), pb.NodeMessage):
                self._owner.received(session, message)

        async def write() -> None:
            while True:
                await context.write(await session.next_outgoing())

        tasks = [asyncio.ensure_future(one) for one in (read(), write(), session.wait_ended())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, grpc.RpcError):
                session.end(f"the stream broke: {outcome}")
            elif isinstance(outcome, Exception):
                raise outcome


def listen(server: grpc.aio.Server, address: str, credentials: Credentials | None) -> int:
    """Its port. With credentials both sides show theirs; a rotation needs no new server, since the
    files are read for each handshake. Raises RuntimeError."""
    port: int
    if credentials is None:
        port = server.add_insecure_port(address)
        return port

    def now() -> grpc.ServerCertificateConfiguration:
        authority, key, certificate = credentials.pem()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    secure = grpc.dynamic_ssl_server_credentials(now(), now, require_client_authentication=True)
    port = server.add_secure_port(address, secure)
    return port


def channel_to(address: str, credentials: Credentials | None) -> grpc.aio.Channel:
    """A node's channel to a router; with credentials both show theirs."""
    options = channel_options()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    authority, key, certificate = credentials.pem()
    secure = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.aio.secure_channel(address, secure, options=options)
