"""The sending end: one connection per transfer, blocks gathered out of the ranks' KV memory by
`sendmsg`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from xxhash import xxh3_64

from core.address import split_address
from core.errors import ConfigError, TransferFailed
from core.kv.ticket import Ticket
from core.kv.transports.base import Piece, single_address
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
_GATHER = 64
"""Buffers of one `sendmsg`; systems allow at least 1,024, and fewer keep the event loop free."""
_TURN_BYTES = 4 << 20
"""After this much the event loop gets a turn, even if the socket takes everything at once."""


class TcpCarrier:
    """Dials the one data socket that a ticket names. See `base.Carrier`; `fan` is for several."""

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> TcpShipment:
        hello = encode_hello(ticket, model)
        address = single_address(ticket)
        try:
            host, port = split_address(address)
        except ConfigError as error:
            raise TransferFailed(str(error)) from error
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.sock_connect(sock, (host, port))
                await loop.sock_sendall(sock, hello)
                reply = await _read_reply(loop, sock)
            if reply is not Reply.WELCOME:
                raise TransferFailed(f"the receiver at {address} did not welcome the ticket")
        except (OSError, TimeoutError) as error:
            sock.close()
            raise TransferFailed(f"the receiver at {address} cannot be reached: {error}") from error
        except BaseException:  # a refusal, or our own cancellation: nobody else holds the socket
            sock.close()
            raise
        return TcpShipment(sock, stall_s=ticket.lease_s, failed=failed)


class TcpShipment:
    """See `base.Shipment`. `stall_s`: the receiver is lost when it takes nothing for so long."""

    def __init__(
        self, sock: socket.socket, *, stall_s: float, failed: Callable[[TransferFailed], None]
    ) -> None:
        self._sock = sock
        self._stall_s = stall_s
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._error: TransferFailed | None = None
        self._finishing = False
        self._reader = asyncio.create_task(self._read(), name="kv-replies")

    async def send(self, pieces: Sequence[Piece]) -> None:
        buffers: list[memoryview] = []
        for piece in pieces:
            check = xxh3_64()
            for part in piece.parts:
                check.update(part)
            head = encode_piece(piece.key, piece.size, check.intdigest())
            buffers += (memoryview(head), *piece.parts)
        await self._send(buffers)

    async def renew(self) -> None:
        await self._send([memoryview(encode_renew())])

    async def finish(self, computed_tokens: int) -> None:
        self._finishing = True
        await self._send([memoryview(encode_end(computed_tokens))])
        try:
            async with asyncio.timeout(self._stall_s):
                await asyncio.shield(self._reader)
        except TimeoutError as error:
            raise TransferFailed("the receiver did not confirm the transfer") from error
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        self._reader.cancel()
        try:
            await asyncio.wait([self._reader])  # the loop lets go of the socket before it closes
        finally:
            self._sock.close()

    async def _send(self, buffers: list[memoryview]) -> None:
        turn = 0
        while buffers:
            if self._error is not None:
                raise self._error
            try:
                count = self._sock.sendmsg(buffers[:_GATHER])
            except BlockingIOError:
                await self._writable()
                turn = 0
                continue
            except OSError as error:
                raise await self._why(error) from error
            buffers = _after(buffers, count)
            turn += count
            if turn >= _TURN_BYTES:
                turn = 0
                await asyncio.sleep(0)

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        self._loop.add_writer(self._sock, wake)
        try:
            async with asyncio.timeout(self._stall_s):
                await ready
        except TimeoutError as error:
            raise TransferFailed(
                f"the receiver has taken nothing for {self._stall_s:g} s"
            ) from error
        finally:
            self._loop.remove_writer(self._sock)

    async def _why(self, error: OSError) -> TransferFailed:
        """The receiver's own words if they came before it hung up."""
        await asyncio.wait([self._reader], timeout=1.0)
        return self._error or TransferFailed(f"the connection to the receiver broke: {error}")

    async def _read(self) -> None:
        """Wait for READY; anything else is the end of the transfer."""
        try:
            reply = await _read_reply(self._loop, self._sock)
            if reply is Reply.READY and self._finishing:
                return
            self._error = TransferFailed("the receiver spoke out of turn")
        except TransferFailed as error:
            self._error = error
        except OSError as error:
            self._error = TransferFailed(f"the connection to the receiver broke: {error}")
        if not self._finishing:
            self._failed(self._error)


async def _read_reply(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> Reply:
    """The next WELCOME or READY. Raises TransferFailed on FAILED and at the end of the stream."""
    data = b""
    while len(data) < REPLY_BYTES:
        more = await loop.sock_recv(sock, REPLY_BYTES - len(data))
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


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `buffers` once `count` bytes are gone."""
    for position, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[position + 1 :]]
        count -= len(buffer)
    return []
