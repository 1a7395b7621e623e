"""The receiving end where the receiver reads: it is shown pieces, copies them itself, and checks.

All of it happens on the event loop, in turns of about half a millisecond: the machine is asked
before every write, so after `withdraw` there is none. A piece is verified when the source still
stands by it after the copy (see `words`) and, where bytes cross a network, when they match the xxh3
that the source has told.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from core.accepting import Accepting
from core.errors import RequestError
from core.framing import FrameDecoder, encode_frame
from core.kv.handoff import Failure, Incoming, Phase, Refusal
from core.kv.ticket import Offer
from core.kv.transports.awaited import Awaited
from core.kv.transports.base import Arrival
from core.kv.transports.one_sided_wire import (
    HELLO_BYTES,
    End,
    Hello,
    Ready,
    Refused,
    Renew,
    Shown,
    Source,
    SourceSaid,
    Taken,
    Welcome,
    decode_hello,
    decode_source,
)
from core.kv.transports.sockets import readable

log = logging.getLogger("skerry.kv")

HELLO_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 256
MAX_DESCRIPTORS = 64
_READ_BYTES = 64 << 10


class Reader(Protocol):
    """A source's memory as we reach it."""

    @property
    def window(self) -> int:
        """How many pieces are best read side by side."""
        ...

    async def copy(
        self, piece: Shown, place: memoryview, may_write: Callable[[], bool]
    ) -> bool | None:
        """Copy the piece into `place`, where it fits: whether it is intact. None when the source no
        longer stands by it, or `may_write` said no. Raises TransferFailed when the source cannot be
        read."""
        ...

    def close(self) -> None: ...


class Way(Protocol):
    """One kind of one-sided transport, at the receiver."""

    def admit(self, sock: socket.socket) -> bool:
        """Whether this peer may speak at all."""
        ...

    def attach(self, source: Source, descriptors: Sequence[int]) -> Reader:
        """`descriptors` came with the hello and are closed by the caller. Raises TransferFailed."""
        ...


@dataclass(frozen=True, slots=True)
class Desk:
    """What the connections of a landing share."""

    way: Way
    awaited: Awaited
    clock: Callable[[], float]


class OneSidedLanding:
    """Listens for sources. See `base.Landing`."""

    def __init__(self, listener: socket.socket, offer: Offer, desk: Desk) -> None:
        self.offers = (offer,)
        self._desk = desk
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._accepting = Accepting(listener, self._welcome, of=f"kv-{offer.kind}")

    @property
    def address(self) -> str:
        return self.offers[0].address

    def expect(self, arrival: Arrival) -> None:
        self._desk.awaited.expect(arrival)

    def withdraw(self, incoming: Incoming) -> None:
        self._desk.awaited.forget(incoming)
        for task, connection in tuple(self._connections.items()):
            if connection.arrival is not None and connection.arrival.incoming is incoming:
                connection.refuse(incoming.closed)
                task.cancel()

    def close(self) -> None:
        self._accepting.close()
        for task, connection in tuple(self._connections.items()):
            connection.refuse(Refusal.CLOSED)
            task.cancel()

    def _welcome(self, sock: socket.socket) -> None:
        if len(self._connections) >= MAX_CONNECTIONS or not self._desk.way.admit(sock):
            log.warning("a source was turned away")
            sock.close()
            return
        sock.setblocking(False)
        connection = _Connection(sock, self._desk)
        task = asyncio.create_task(connection.run(), name="kv-source")
        self._connections[task] = connection
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task).close()
        if not task.cancelled() and task.exception() is not None:
            log.error("a source's connection: a fault of ours", exc_info=task.exception())


class _Connection:
    """One source: a hello, then pieces to read. `arrival` is set once the hello is accepted."""

    def __init__(self, sock: socket.socket, desk: Desk) -> None:
        self.arrival: Arrival | None = None
        self._sock = sock
        self._desk = desk
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder[SourceSaid](SourceSaid)

    async def run(self) -> None:
        """Until the transfer is over. The one who cancels this has ended the machine."""
        reader: Reader | None = None
        try:
            reader = await self._greet()
            if reader is not None and self.arrival is not None:
                await self._serve(self.arrival, reader)
        except (OSError, RequestError) as error:
            log.info("a source's connection broke: %s", error)
            self._fail(Refusal.PROTOCOL)
        finally:
            if reader is not None:
                reader.close()

    def close(self) -> None:
        """Once `run` is over, or was never begun."""
        self._sock.close()

    def refuse(self, refusal: Refusal) -> None:
        self._say(Refused(str(refusal)))

    async def _greet(self) -> Reader | None:
        """The hello; None when it is not welcome. A stranger's changes nothing here."""
        descriptors: list[int] = []
        try:
            try:
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    hello, source = await self._hello(descriptors)
            except TimeoutError:
                hello, source = None, None
            if hello is None or source is None:
                self.refuse(Refusal.PROTOCOL)
                return None
            return self._welcome(hello, source, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    async def _hello(self, descriptors: list[int]) -> tuple[Hello | None, Source | None]:
        head = await self._exactly(HELLO_BYTES, descriptors)
        hello = decode_hello(head) if head is not None else None
        if hello is None:
            return None, None
        body = await self._exactly(hello.source_bytes, descriptors)
        return hello, decode_source(body) if body is not None else None

    async def _exactly(self, count: int, descriptors: list[int]) -> bytes | None:
        """None: the source hung up. Descriptors are collected as they come."""
        data = b""
        while len(data) < count:
            await readable(self._loop, self._sock)
            more, came, _, _ = socket.recv_fds(
                self._sock,
                count - len(data),
                MAX_DESCRIPTORS,
                getattr(socket, "MSG_CMSG_CLOEXEC", 0),
            )
            descriptors += came
            if not more:
                return None
            data += more
        return data

    def _welcome(self, hello: Hello, source: Source, descriptors: Sequence[int]) -> Reader | None:
        arrival = self._desk.awaited.claim(hello.generation)
        if arrival is None:
            self.refuse(Refusal.TICKET)
            return None
        reader = self._desk.way.attach(source, descriptors)
        refusal = arrival.incoming.hello(
            hello.ticket_id, hello.generation, hello.model, now=self._desk.clock()
        )
        if refusal is not None:
            reader.close()
            self.refuse(refusal)
            if arrival.incoming.over:  # the hello found that the lease has run out
                self._desk.awaited.settled(arrival)
            return None
        self.arrival = arrival
        self._say(Welcome())
        return reader

    async def _serve(self, arrival: Arrival, reader: Reader) -> None:
        incoming = arrival.incoming
        while incoming.phase is Phase.RECEIVING:
            data = await self._loop.sock_recv(self._sock, _READ_BYTES)
            if not data:
                if incoming.lost():
                    self._desk.awaited.settled(arrival)
                return
            for message in self._decoder.feed(data):
                refusal = await self._obey(message, arrival, reader)
                if refusal is not None:
                    self._fail(refusal)
                    return

    async def _obey(self, message: SourceSaid, arrival: Arrival, reader: Reader) -> Refusal | None:
        now = self._desk.clock()
        if isinstance(message, Renew):
            return arrival.incoming.renew(now=now)
        if isinstance(message, End):
            refusal = arrival.incoming.end(message.computed_tokens, now=now)
            if refusal is None:
                self._say(Ready())
                self._desk.awaited.settled(arrival)
            return refusal
        for start in range(0, len(message.pieces), reader.window):
            some = message.pieces[start : start + reader.window]
            if len(some) == 1:
                refusals = [await self._take(some[0], arrival, reader)]
            else:
                refusals = await asyncio.gather(*(self._take(one, arrival, reader) for one in some))
            refused = next((one for one in refusals if one is not None), None)
            if refused is not None:
                return refused
        self._say(Taken(len(message.pieces)))
        return None

    async def _take(self, piece: Shown, arrival: Arrival, reader: Reader) -> Refusal | None:
        key, incoming = piece.key, arrival.incoming
        refusal = incoming.begin(key, piece.size, now=self._desk.clock())
        if refusal is not None:
            return refusal
        may_write = partial(incoming.may_write, key)
        intact = await reader.copy(piece, arrival.places[key], may_write)
        if intact is None and may_write():
            incoming.fail(Failure.PEER_LOST)
            return Refusal.CLOSED
        return incoming.end_piece(key, intact=bool(intact), now=self._desk.clock())

    def _fail(self, refusal: Refusal) -> None:
        """The transfer goes no further on this connection, whatever the machine thinks so far."""
        self.refuse(refusal)
        if self.arrival is not None:
            self.arrival.incoming.lost()
            self._desk.awaited.settled(self.arrival)

    def _say(self, message: msgspec.Struct) -> None:
        """A few bytes into a socket buffer that is as good as empty: they fit, or the peer is
        gone."""
        try:
            self._sock.send(encode_frame(message))
        except OSError as error:
            log.debug("to a source: %s not sent: %s", type(message).__name__, error)
