"""Sockets that do not block, plain or in TLS, with the calls that the transports need.

`PlainLink` and `TlsLink` raise BlockingIOError where they would have to wait, and OSError when the
connection is broken.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Protocol

_TLS_WRITE_BYTES = 256 << 10
_WANTS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Link(Protocol):
    @property
    def sock(self) -> socket.socket:
        """What the event loop watches."""
        ...

    @property
    def pending(self) -> bool:
        """Bytes have come that the event loop cannot see."""
        ...

    def established(self) -> bool:
        """Whether bytes can go to and fro; goes on with the handshake where there is one."""
        ...

    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers, in their order, with what has come: at least one byte, 0 at the end."""
        ...

    def send(self, buffers: Sequence[memoryview]) -> int:
        """Bytes taken of the buffers, in their order. After a BlockingIOError the next call must be
        given the same bytes."""
        ...

    def close(self) -> None: ...


class PlainLink:
    """See `Link`."""

    pending = False

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock

    def established(self) -> bool:
        return True

    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        return self.sock.recvmsg_into(buffers)[0]

    def send(self, buffers: Sequence[memoryview]) -> int:
        return self.sock.sendmsg(buffers)

    def close(self) -> None:
        self.sock.close()


class TlsLink:
    """See `Link`. `host`: whose certificate a client expects; None makes a server."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext, host: str | None) -> None:
        sock.setblocking(False)
        self.sock: ssl.SSLSocket = tls.wrap_socket(
            sock,
            server_side=host is None,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=True,
            server_hostname=host,
        )
        self._established = False

    @property
    def pending(self) -> bool:
        return self.sock.pending() > 0

    def established(self) -> bool:
        if not self._established:
            try:
                self.sock.do_handshake()
            except _WANTS:
                return False
            self._established = True
        return True

    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self.sock.recv_into(buffers[0])
        except _WANTS as error:
            raise BlockingIOError from error

    def send(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self.sock.send(buffers[0][:_TLS_WRITE_BYTES])
        except _WANTS as error:
            raise BlockingIOError from error

    def close(self) -> None:
        self.sock.close()


async def shake_hands(loop: asyncio.AbstractEventLoop, link: Link) -> None:
    """What a client waits for: the server speaks next, whenever we cannot go on."""
    while not link.established():
        await readable(loop, link.sock)


async def receive(loop: asyncio.AbstractEventLoop, link: Link, count: int) -> bytes:
    """At most `count` bytes; none at the end."""
    buffer = bytearray(count)
    view = memoryview(buffer)
    while True:
        try:
            return bytes(view[: link.receive_into([view])])
        except BlockingIOError:
            await readable(loop, link.sock)


async def send_all(loop: asyncio.AbstractEventLoop, link: Link, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[link.send([rest]) :]
        except BlockingIOError:
            await writable(loop, link.sock)


async def readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock.fileno(), _wake, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())


async def writable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock.fileno(), _wake, ready)
    try:
        await ready
    finally:
        loop.remove_writer(sock.fileno())


def peer_uid(sock: socket.socket) -> int:
    """Who is at the other end of a Unix socket (Linux)."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
