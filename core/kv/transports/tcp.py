"""The receiving end of a node's data socket: pieces go from the kernel straight into KV memory.

One `recvmsg_into` fills the rest of a block and the head that follows it. All reading happens in
callbacks of the event loop on sockets that do not block: while `TcpLanding.withdraw` runs no read
can be under way, and after it there is no callback left, so an aborted transfer cannot write.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from xxhash import xxh3_64_intdigest

from core.accepting import Accepting
from core.kv.handoff import Failure, Incoming, Phase, Refusal
from core.kv.ticket import Offer
from core.kv.transports.awaited import Awaited
from core.kv.transports.base import TCP, TCP_TLS, Arrival
from core.kv.transports.sockets import Link, PlainLink, TlsLink
from core.kv.transports.tcp_wire import (
    HEAD_BYTES,
    HELLO_BYTES,
    Head,
    Kind,
    Reply,
    decode_head,
    decode_hello,
    encode_reply,
)

log = logging.getLogger("skerry.kv")

HELLO_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 256
_READ_BUDGET_BYTES = 2 << 20
"""Read at most this much in one turn of the event loop: about half a millisecond."""


class TcpLanding:
    """Listens, and writes the pieces of the transfers that `expect` names. See `base.Landing`."""

    def __init__(
        self,
        listener: socket.socket,
        clock: Callable[[], float],
        awaited: Awaited,
        tls: ssl.SSLContext | None,
        host: str,
    ) -> None:
        self._clock = clock
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self.awaited = awaited
        self._connections: set[_Connection] = set()
        port = listener.getsockname()[1]
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._accepting = Accepting(listener, self._welcome, of="kv-data")

    @classmethod
    def listen(
        cls,
        host: str,
        clock: Callable[[], float],
        awaited: Awaited | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> TcpLanding:
        """Listen on a free port of `host`, which is what certificates name, and tickets too.
        `awaited`: where other landings serve the same transfers. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=128)
        return cls(listener, clock, awaited or Awaited(), tls, host)

    @property
    def address(self) -> str:
        return self._address

    @property
    def offers(self) -> tuple[Offer, ...]:
        return (Offer(TCP if self._tls is None else TCP_TLS, self._address),)

    def expect(self, arrival: Arrival) -> None:
        self.awaited.expect(arrival)

    def withdraw(self, incoming: Incoming) -> None:
        self.awaited.forget(incoming)
        for connection in self._serving(incoming):
            connection.close(incoming.closed)

    def complete(self, arrival: Arrival) -> None:
        """The machine is READY: tell the sender, on all of its streams, and the owner."""
        for connection in self._serving(arrival.incoming):
            connection.confirm()
        self.awaited.settled(arrival)

    def close(self) -> None:
        self._accepting.close()
        for connection in tuple(self._connections):
            connection.close(Refusal.CLOSED)

    def left(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    def _serving(self, incoming: Incoming) -> list[_Connection]:
        return [
            one
            for one in self._connections
            if one.arrival is not None and one.arrival.incoming is incoming
        ]

    def _welcome(self, sock: socket.socket) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            log.warning("data socket: more than %d connections, one refused", MAX_CONNECTIONS)
            sock.close()
            return
        try:
            link = PlainLink(sock) if self._tls is None else TlsLink(sock, self._tls, None)
        except OSError:  # gone again, before a word of TLS
            sock.close()
            return
        self._connections.add(_Connection(link, self, self._clock, self._loop))


class _Connection:
    """One sender: a hello, then pieces. `arrival` is set once the hello is accepted."""

    def __init__(
        self,
        link: Link,
        landing: TcpLanding,
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.arrival: Arrival | None = None
        self._link = link
        self._landing = landing
        self._clock = clock
        self._loop = loop
        self._hello = bytearray(HELLO_BYTES)
        self._head = bytearray(HEAD_BYTES)
        self._head_view = memoryview(self._head)
        self._control = memoryview(self._hello)
        """The part of the hello or head that is still to come."""
        self._piece: Head | None = None
        self._place = memoryview(b"")
        self._rest = memoryview(b"")
        """The part of the open block that is still to come."""
        self._open = True
        self._timeout = loop.call_later(HELLO_TIMEOUT_S, self.close, Refusal.PROTOCOL)
        loop.add_reader(link.sock.fileno(), self._readable)

    def close(self, refusal: Refusal | None) -> None:
        """Stop reading at once; with `refusal`, tell the sender why."""
        if not self._open:
            return
        self._open = False
        self._timeout.cancel()
        self._loop.remove_reader(self._link.sock.fileno())
        if refusal is not None:
            self._say(Reply.FAILED, refusal)
        self._rest = self._place = memoryview(b"")
        self._link.close()
        self._landing.left(self)

    def confirm(self) -> None:
        self._say(Reply.READY)
        self.close(None)

    def _readable(self) -> None:
        budget = _READ_BUDGET_BYTES
        while self._open and budget > 0:
            try:
                if not self._link.established():
                    return
                count = self._receive()
            except BlockingIOError:
                return
            except OSError as error:
                log.debug("data socket: %s", error)
                count = 0
            if count == 0:
                self._lost()
                return
            budget -= count
            self._advance(count)
        if self._open and self._link.pending:
            self._loop.call_soon(self._readable)

    def _receive(self) -> int:
        if self._piece is None:
            return self._link.receive_into([self._control])
        if self.arrival is None or not self.arrival.incoming.may_write(self._piece.key):
            return 0
        if not self._rest:  # a block without bytes
            return self._link.receive_into([self._control])
        return self._link.receive_into([self._rest, self._control])

    def _advance(self, count: int) -> None:
        if self._piece is not None:
            taken = min(count, len(self._rest))
            self._rest = self._rest[taken:]
            count -= taken
            if not self._rest:
                self._end_piece(self._piece)
        self._control = self._control[count:]
        if self._open and not self._control:
            if self.arrival is None:
                self._greet()
            else:
                self._next(self.arrival)

    def _greet(self) -> None:
        hello = decode_hello(self._hello)
        self._control = self._head_view
        if hello is None:
            self.close(Refusal.PROTOCOL)
            return
        arrival = self._landing.awaited.claim(hello.generation)
        if arrival is None:
            self.close(Refusal.TICKET)
            return
        greet = arrival.incoming.join if hello.joins else arrival.incoming.hello
        refusal = greet(hello.ticket_id, hello.generation, hello.model, now=self._clock())
        if refusal is not None:
            self.close(refusal)
            if arrival.incoming.over:  # the hello found that the lease has run out
                self._landing.awaited.settled(arrival)
            return
        self._timeout.cancel()
        self.arrival = arrival
        self._say(Reply.WELCOME)

    def _next(self, arrival: Arrival) -> None:
        head = decode_head(self._head)
        self._control = self._head_view
        incoming, now = arrival.incoming, self._clock()
        if head is None:
            incoming.fail(Failure.PEER_LOST)
            self._check(Refusal.PROTOCOL)
        elif head.kind is Kind.PIECE:
            self._check(incoming.begin(head.key, head.size, now=now))
            if self._open:
                self._piece = head
                self._place = self._rest = arrival.places[head.key]
        elif head.kind is Kind.RENEW:
            self._check(incoming.renew(now=now))
        else:
            self._check(incoming.end(head.size, now=now))
            if incoming.phase is Phase.READY:
                self._landing.complete(arrival)

    def _end_piece(self, head: Head) -> None:
        if self.arrival is not None:
            intact = xxh3_64_intdigest(self._place) == head.digest
            answer = self.arrival.incoming.end_piece(head.key, intact=intact, now=self._clock())
            self._check(answer)
        self._piece = None
        self._place = self._rest = memoryview(b"")

    def _check(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            self.close(refusal)
            if self.arrival is not None:
                self._landing.awaited.settled(self.arrival)

    def _lost(self) -> None:
        self.close(None)
        if self.arrival is not None and self.arrival.incoming.lost():
            self._landing.awaited.settled(self.arrival)

    def _say(self, reply: Reply, refusal: Refusal | None = None) -> None:
        """Two bytes into an empty socket buffer: they fit, or the peer is gone."""
        try:
            self._link.send([memoryview(encode_reply(reply, refusal))])
        except OSError as error:
            log.debug("data socket: reply %s not sent: %s", reply.name, error)
