"""The sending end: one connection or several per transfer, blocks gathered out of the ranks' KV
memory by `sendmsg`.

On one host a single stream is as fast as the machine; between hosts one stream is held back by its
window and by the one core that serves it at either end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from time import perf_counter

from xxhash import xxh3_64

from core.address import is_loopback, split_address
from core.errors import ConfigError, TransferFailed
from core.kv.ticket import Ticket
from core.kv.transports.base import Piece, single_address
from core.kv.transports.sockets import (
    Link,
    PlainLink,
    TlsLink,
    receive,
    send_all,
    shake_hands,
    writable,
)
from core.kv.transports.tcp_wire import (
    REPLY_BYTES,
    Reply,
    decode_reply,
    encode_end,
    encode_hello,
    encode_piece,
    encode_renew,
)

log = logging.getLogger("skerry.kv")

CONNECT_TIMEOUT_S = 5.0
STREAMS = 4
"""Connections of a large transfer to another host."""
_STREAM_BYTES = 8 << 20
"""A further connection has to carry as much, or it is not worth its round trip."""
_BATCH_BYTES = 1 << 20
"""Checked and then sent while it is in the cache."""
_TURN_S = 0.0005
"""After so long the event loop gets a turn, even if the socket takes everything at once."""
_BATCH_PIECES = 64


class TcpCarrier:
    """Dials the one data socket that a ticket names. See `base.Carrier`; `fan` is for several.

    `streams`: connections of a transfer; None leaves it to its size and to where the receiver is. A
    receiver that makes no offers knows of one only.
    """

    def __init__(self, *, tls: ssl.SSLContext | None = None, streams: int | None = None) -> None:
        self._tls = tls
        self._streams = streams

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> TcpShipment:
        address = single_address(ticket)
        try:
            host, port = split_address(address)
        except ConfigError as error:
            raise TransferFailed(str(error)) from error
        named = ticket.named or host
        shipment = TcpShipment(stall_s=ticket.lease_s, failed=failed)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                hello = encode_hello(ticket, model)
                shipment.add(await self._dial(host, port, named, hello))
                more = self._worthwhile(ticket, host) - 1
                if more > 0:
                    joining = encode_hello(ticket, model, joins=True)
                    await _together(
                        self._join(shipment, host, port, named, joining) for _ in range(more)
                    )
        except (OSError, TimeoutError) as error:
            await shipment.close()
            raise TransferFailed(f"the receiver at {address} cannot be reached: {error}") from error
        except BaseException:  # a refusal, or our own cancellation: nobody else holds the sockets
            await shipment.close()
            raise
        return shipment

    def _worthwhile(self, ticket: Ticket, host: str) -> int:
        if not all(endpoint.offers for endpoint in ticket.endpoints):
            return 1
        if self._streams is not None:
            return self._streams
        size = sum(one.block_bytes * len(one.blocks) for one in ticket.endpoints)
        return max(1, min(1 if is_loopback(host) else STREAMS, size // _STREAM_BYTES))

    async def _join(
        self, shipment: TcpShipment, host: str, port: int, named: str, hello: bytes
    ) -> None:
        shipment.add(await self._dial(host, port, named, hello))

    async def _dial(self, host: str, port: int, named: str, hello: bytes) -> Link:
        """A connection on which the receiver has said welcome; `named` by its certificate."""
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        link: Link | None = None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, (host, port))
            link = PlainLink(sock) if self._tls is None else TlsLink(sock, self._tls, named)
            await shake_hands(loop, link)
            await send_all(loop, link, hello)
            reply = await _read_reply(loop, link)
            if reply is not Reply.WELCOME:
                raise TransferFailed("the receiver did not welcome the ticket")
        except BaseException:
            (sock if link is None else link).close()
            raise
        return link


class TcpShipment:
    """See `base.Shipment`. `stall_s`: the receiver is lost when it takes nothing for so long."""

    def __init__(self, *, stall_s: float, failed: Callable[[TransferFailed], None]) -> None:
        self._stall_s = stall_s
        self._failed: Callable[[TransferFailed], None] | None = failed
        self._streams: list[_Stream] = []
        self._finishing = False

    def add(self, link: Link) -> None:
        """A further connection that the receiver has welcomed."""
        self._streams.append(_Stream(link, self._stall_s, self._lost))

    async def send(self, pieces: Sequence[Piece]) -> None:
        waiting = deque(pieces)
        await _together(stream.send_from(waiting) for stream in self._streams)

    async def renew(self) -> None:
        await self._streams[0].send([memoryview(encode_renew())])

    async def finish(self, computed_tokens: int) -> None:
        self._finishing = True
        await _together(stream.finish(computed_tokens) for stream in self._streams)

    async def close(self) -> None:
        readers = [stream.stop() for stream in self._streams]
        try:
            if readers:
                await asyncio.wait(readers)  # the loop lets go of the sockets before they close
        finally:
            for stream in self._streams:
                stream.close()

    def _lost(self, error: TransferFailed) -> None:
        """A stream has ended, of itself."""
        failed, self._failed = self._failed, None
        if failed is not None and not self._finishing:
            failed(error)


class _Stream:
    """One connection of a transfer."""

    def __init__(self, link: Link, stall_s: float, lost: Callable[[TransferFailed], None]) -> None:
        self._link = link
        self._stall_s = stall_s
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._error: TransferFailed | None = None
        self._finishing = False
        self._reader = asyncio.create_task(self._read(), name="kv-replies")

    async def send_from(self, waiting: deque[Piece]) -> None:
        """Send pieces until none is left, in turn with the other streams of the transfer."""
        turn = perf_counter()
        while waiting:
            buffers: list[memoryview] = []
            size = 0
            while waiting and size < _BATCH_BYTES and len(buffers) < 2 * _BATCH_PIECES:
                piece = waiting.popleft()
                check = xxh3_64()
                for part in piece.parts:
                    check.update(part)
                head = encode_piece(piece.key, piece.size, check.intdigest())
                buffers += (memoryview(head), *piece.parts)
                size += piece.size
            await self.send(buffers)
            if perf_counter() - turn > _TURN_S:
                await asyncio.sleep(0)
                turn = perf_counter()

    async def send(self, buffers: list[memoryview]) -> None:
        while buffers:
            if self._error is not None:
                raise self._error
            try:
                count = self._link.send(buffers[:_MOST_BUFFERS])
            except BlockingIOError:
                await self._writable()
                continue
            except OSError as error:
                raise await self._why(error) from error
            buffers = _after(buffers, count)

    async def finish(self, computed_tokens: int) -> None:
        self._finishing = True
        await self.send([memoryview(encode_end(computed_tokens))])
        try:
            async with asyncio.timeout(self._stall_s):
                await asyncio.shield(self._reader)
        except TimeoutError as error:
            raise TransferFailed("the receiver did not confirm the transfer") from error
        if self._error is not None:
            raise self._error

    def stop(self) -> asyncio.Task[None]:
        self._reader.cancel()
        return self._reader

    def close(self) -> None:
        """Once the reader has ended."""
        self._link.close()

    async def _writable(self) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await writable(self._loop, self._link.sock)
        except TimeoutError as error:
            raise TransferFailed(
                f"the receiver has taken nothing for {self._stall_s:g} s"
            ) from error

    async def _why(self, error: OSError) -> TransferFailed:
        """The receiver's own words if they came before it hung up."""
        await asyncio.wait([self._reader], timeout=1.0)
        return self._error or _broken(error)

    async def _read(self) -> None:
        """Wait for READY; anything else is the end of the transfer."""
        try:
            reply = await _read_reply(self._loop, self._link)
            if reply is Reply.READY and self._finishing:
                return
            self._error = TransferFailed("the receiver spoke out of turn")
        except TransferFailed as error:
            self._error = error
        except OSError as error:
            self._error = _broken(error)
        self._lost(self._error)


_MOST_BUFFERS = 512
"""Of one `sendmsg`; systems allow at least 1,024."""


async def _read_reply(loop: asyncio.AbstractEventLoop, link: Link) -> Reply:
    """The next WELCOME or READY. Raises TransferFailed on FAILED and at the end of the stream."""
    data = b""
    while len(data) < REPLY_BYTES:
        more = await receive(loop, link, REPLY_BYTES - len(data))
        if not more:
            raise TransferFailed("the receiver closed the connection")
        data += more
    decoded = decode_reply(data)
    if decoded is None:
        raise TransferFailed("the receiver's reply is none of ours")
    reply, refusal = decoded
    if reply is Reply.FAILED:
        raise TransferFailed(f"the receiver refused: {refusal}")
    return reply


async def _together(works: Iterable[Awaitable[None]]) -> None:
    """All side by side; the first error once all have ended."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def _broken(error: OSError) -> TransferFailed:
    return TransferFailed(f"the connection to the receiver broke: {error}")


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `buffers` once `count` bytes are gone."""
    for position, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[position + 1 :]]
        count -= len(buffer)
    return []
