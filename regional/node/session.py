"""The node's end of a session with a router: dial, join, shuttle messages, dial again for ever."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import grpc

from core.errors import Forbidden, VersionSkew
from core.tls import Credentials
from core.types import WIRE_VERSION
from regional import rpc
from regional.node.ledger import Account, Ledger
from regional.node.seams import Outbox
from regional.pb import node_pb2 as pb

log = logging.getLogger("skerry.node")

WELCOME_TIMEOUT_S = 10.0
BEATS = 4
"""Heartbeats in the time in which the router expects one: what it shows of us is that fresh."""
LEAST_BEAT_S = 0.02
"""Between two heartbeats, whatever changes."""
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
REJECTED_RETRY_S = 15.0
"""A router that speaks another version or knows another secret will not mend itself soon."""


class SessionUser(Protocol):
    """The front, as a session sees it."""

    def session_opened(self, outbox: Outbox) -> None: ...

    def session_closed(self, outbox: Outbox) -> None: ...

    def handle(self, message: pb.RouterMessage, outbox: Outbox) -> None: ...


class _Ended(Exception):
    """The session is over; `retry_s` None: dial again as usual."""

    lasted_s = 0.0
    """From the welcome on."""

    def __init__(self, why: str, retry_s: float | None = None) -> None:
        super().__init__(why)
        self.retry_s = retry_s


class _Outbox:
    """What waits to be written to one session; nothing is taken once it is closed."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._queue: asyncio.Queue[pb.NodeMessage] = asyncio.Queue()
        self.overflow = asyncio.Event()
        self._unsent = 0
        self.written = asyncio.Event()
        self.written.set()
        self.over = asyncio.Event()
        self.closed = False

    def send(self, message: pb.NodeMessage) -> None:
        if self.closed:
            return
        if self._unsent >= rpc.MAX_UNSENT:
            self.overflow.set()
            return
        self._unsent += 1
        self._account.said(message)
        self.written.clear()
        self._queue.put_nowait(message)

    async def next(self) -> pb.NodeMessage:
        return await self._queue.get()

    def note_written(self) -> None:
        self._unsent -= 1
        if not self._unsent:
            self.written.set()


class RouterSession:
    """One router. `join` and `heartbeat` make the messages of those names, the latter without what
    other routers have under way here; `run` does not return before `leave`. After each end of a
    session the user has aborted all that came through it."""

    def __init__(
        self,
        address: str,
        user: SessionUser,
        *,
        join: Callable[[], pb.NodeMessage],
        heartbeat: Callable[[], pb.NodeMessage],
        ledger: Ledger,
        credentials: Credentials | None = None,
    ) -> None:
        self._address = address
        self._identity = credentials
        self._ledger = ledger
        self.account: Account | None = None
        """What this router has under way here, while there is a session."""
        self._user = user
        self._join = join
        self._heartbeat = heartbeat
        self._outbox: _Outbox | None = None
        self._call: grpc.aio.StreamStreamCall[object, object] | None = None
        self._left = False
        self._beat_now = asyncio.Event()

    async def run(self) -> None:
        """Keep a session until cancelled or left."""
        usual_s = FIRST_RETRY_S
        while True:
            ended = await self._one()
            if self._left:
                return
            log.warning("router at %s: %s", self._address, ended)
            # A session that was cut short at once tells no more than one that was refused.
            lasting = ended.lasted_s > LAST_RETRY_S
            usual_s = FIRST_RETRY_S if lasting else min(LAST_RETRY_S, usual_s * 2)
            await asyncio.sleep(usual_s if ended.retry_s is None else ended.retry_s)

    def beat(self) -> None:
        """Send a heartbeat now: something that a router decides by has changed."""
        self._beat_now.set()

    async def leave(self, reason: str, *, timeout_s: float) -> None:
        """Say goodbye, and wait until the router has read everything that was said and hung up:
        a call that is cancelled drops what is still on its way."""
        outbox, call = self._outbox, self._call
        if outbox is None or call is None:
            return
        self._left = True
        outbox.send(pb.NodeMessage(leaving=pb.Leaving(reason=reason)))
        outbox.closed = True  # a heartbeat after the end of writing would break the call off
        try:
            async with asyncio.timeout(timeout_s):
                await outbox.written.wait()
                await call.done_writing()
                await outbox.over.wait()
        except TimeoutError:
            log.warning("router at %s does not read; leaving without a word", self._address)

    async def _one(self) -> _Ended:
        """One session from dialling to its end."""
        joined_at: float | None = None
        try:
            async with self._channel() as call:
                heartbeat_s = await self._greet(call)
                log.info("joined the router at %s", self._address)
                joined_at = time.monotonic()
                ended = await self._serve(call, heartbeat_s)
        except _Ended as error:
            ended = error
        if joined_at is not None:
            ended.lasted_s = time.monotonic() - joined_at
        return ended

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[grpc.aio.StreamStreamCall[object, object]]:
        channel = rpc.channel_to(self._address, self._identity)
        try:
            method = channel.stream_stream(
                rpc.SESSION_METHOD,
                request_serializer=rpc.encode_node_message,
                response_deserializer=rpc.decode_router_message,
            )
            call = method()
            try:
                yield call
            except grpc.aio.AioRpcError as error:
                raise _Ended(f"{error.code().name} {error.details()}") from error
            except asyncio.InvalidStateError as error:  # grpc.aio: write on a call that is over
                raise _Ended("the stream is closed") from error
            finally:
                call.cancel()
        finally:
            await channel.close()

    async def _greet(self, call: grpc.aio.StreamStreamCall[object, object]) -> float:
        """Join; returns the heartbeat's interval."""
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                await call.write(self._join())
                answer = await call.read()
        except TimeoutError as error:
            raise _Ended("no welcome came") from error
        if not isinstance(answer, pb.RouterMessage):
            raise _Ended("the stream ended before the welcome")
        if answer.HasField("rejected"):
            rejected = answer.rejected
            slow = rejected.code in (Forbidden.code, VersionSkew.code)
            raise _Ended(
                f"refused: {rejected.code}: {rejected.message}", REJECTED_RETRY_S if slow else None
            )
        if answer.welcome.wire != WIRE_VERSION:
            raise _Ended(
                f"it speaks wire {answer.welcome.wire}, this node {WIRE_VERSION}", REJECTED_RETRY_S
            )
        return answer.welcome.heartbeat_s

    async def _serve(
        self, call: grpc.aio.StreamStreamCall[object, object], heartbeat_s: float
    ) -> _Ended:
        account = self.account = self._ledger.open()
        outbox = self._outbox = _Outbox(account)
        self._call = call
        self._user.session_opened(outbox)
        works = [
            asyncio.ensure_future(one)
            for one in (
                self._read(call, outbox, account),
                self._write(call, outbox),
                self._beat(outbox, account, heartbeat_s),
                outbox.overflow.wait(),
            )
        ]
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        finally:
            outbox.closed = True
            outbox.over.set()
            outbox.written.set()  # what is not, never will be: nobody is to wait for it
            self._outbox = self._call = self.account = None
            self._user.session_closed(outbox)
            account.close()
            for one in works:
                one.cancel()
            outcomes = await asyncio.gather(*works, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return _Ended("it does not read what we say" if outbox.overflow.is_set() else "it hung up")

    async def _read(
        self,
        call: grpc.aio.StreamStreamCall[object, object],
        outbox: _Outbox,
        account: Account,
    ) -> None:
        while isinstance(message := await call.read(), pb.RouterMessage):
            account.heard(message)
            self._user.handle(message, outbox)

    async def _write(
        self, call: grpc.aio.StreamStreamCall[object, object], outbox: _Outbox
    ) -> None:
        while True:
            await call.write(await outbox.next())
            outbox.note_written()

    async def _beat(self, outbox: _Outbox, account: Account, heartbeat_s: float) -> None:
        while True:
            self._beat_now.clear()
            message = self._heartbeat()
            message.heartbeat.others.extend(self._ledger.others(account))
            outbox.send(message)
            await asyncio.sleep(LEAST_BEAT_S)
            try:
                async with asyncio.timeout(heartbeat_s / BEATS):
                    await self._beat_now.wait()
            except TimeoutError:
                continue
