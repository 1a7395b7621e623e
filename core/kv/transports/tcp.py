"""The receiving end of a node's data socket: pieces go from the kernel straight into KV memory.

One `recvmsg_into` fills the rest of a block and the head that follows it. All reading happens in
callbacks of the event loop on sockets that do not block: while `TcpLanding.withdraw` runs no read
can be under way, and after it there is no callback left, so an aborted transfer cannot write.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from xxhash import xxh3_64_intdigest

from core.kv.handoff import Failure, Incoming, Refusal
from core.kv.transports.base import Arrival
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

    def __init__(self, listener: socket.socket, clock: Callable[[], float]) -> None:
        self._listener = listener
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._arrivals: dict[int, Arrival] = {}
        self._connections: set[_Connection] = set()
        host, port = listener.getsockname()[:2]
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._loop.add_reader(listener, self._accept)

    @classmethod
    def listen(cls, host: str, clock: Callable[[], float]) -> TcpLanding:
        """Listen on a free port of `host`. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=128)
        listener.setblocking(False)
        return cls(listener, clock)

    @property
    def address(self) -> str:
        return self._address

    def expect(self, arrival: Arrival) -> None:
        self._arrivals[arrival.incoming.ticket.generation] = arrival

    def withdraw(self, incoming: Incoming) -> None:
        self._arrivals.pop(incoming.ticket.generation, None)
        for connection in tuple(self._connections):
            if connection.arrival is not None and connection.arrival.incoming is incoming:
                connection.close(incoming.closed)

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in tuple(self._connections):
            connection.close(Refusal.CLOSED)

    def claim(self, generation: int) -> Arrival | None:
        return self._arrivals.get(generation)

    def settled(self, arrival: Arrival) -> None:
        """The machine of `arrival` has become READY or FAILED on a connection."""
        if self._arrivals.pop(arrival.incoming.ticket.generation, None) is not None:
            arrival.changed()

    def left(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the peer went away between the wake-up and now
        if len(self._connections) >= MAX_CONNECTIONS:
            log.warning("data socket: more than %d connections, one refused", MAX_CONNECTIONS)
            sock.close()
            return
        self._connections.add(_Connection(sock, self, self._clock, self._loop))


class _Connection:
    """One sender: a hello, then pieces. `arrival` is set once the hello is accepted."""

    def __init__(
        self,
        sock: socket.socket,
        landing: TcpLanding,
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.arrival: Arrival | None = None
        self._sock = sock
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
        loop.add_reader(sock, self._readable)

    def close(self, refusal: Refusal | None) -> None:
        """Stop reading at once; with `refusal`, tell the sender why."""
        if not self._open:
            return
        self._open = False
        self._timeout.cancel()
        self._loop.remove_reader(self._sock)
        if refusal is not None:
            self._say(Reply.FAILED, refusal)
        self._rest = self._place = memoryview(b"")
        self._sock.close()
        self._landing.left(self)

    def _readable(self) -> None:
        budget = _READ_BUDGET_BYTES
        while self._open and budget > 0:
            try:
                count = self._receive()
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if count == 0:
                self._lost()
                return
            budget -= count
            self._advance(count)

    def _receive(self) -> int:
        if self._piece is None:
            return self._sock.recv_into(self._control)
        if self.arrival is None or not self.arrival.incoming.writable:
            return 0
        if not self._rest:  # a block without bytes
            return self._sock.recv_into(self._control)
        return self._sock.recvmsg_into([self._rest, self._control])[0]

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
        arrival = self._landing.claim(hello.generation)
        if arrival is None:
            self.close(Refusal.TICKET)
            return
        refusal = arrival.incoming.hello(
            hello.ticket_id, hello.generation, hello.model, now=self._clock()
        )
        if refusal is not None:
            self.close(refusal)
            if arrival.incoming.over:  # the hello found that the lease has run out
                self._landing.settled(arrival)
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
            if self._open:
                self._say(Reply.READY)
                self.close(None)
                self._landing.settled(arrival)

    def _end_piece(self, head: Head) -> None:
        if self.arrival is not None:
            intact = xxh3_64_intdigest(self._place) == head.digest
            self._check(self.arrival.incoming.end_piece(intact=intact, now=self._clock()))
        self._piece = None
        self._place = self._rest = memoryview(b"")

    def _check(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            self.close(refusal)
            if self.arrival is not None:
                self._landing.settled(self.arrival)

    def _lost(self) -> None:
        self.close(None)
        if self.arrival is not None and self.arrival.incoming.lost():
            self._landing.settled(self.arrival)

    def _say(self, reply: Reply, refusal: Refusal | None = None) -> None:
        """Two bytes into an empty socket buffer: they fit, or the peer is gone."""
        try:
            self._sock.send(encode_reply(reply, refusal))
        except OSError as error:
            log.debug("data socket: reply %s not sent: %s", reply.name, error)
