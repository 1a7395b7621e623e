"""Accepts callers who are to speak https: the handshake first, within a limit, and only then a
connection as the server knows it.

The first byte is looked at before anything is read: a caller who speaks plain HTTP is told so
instead of being cut, and one who says nothing costs no more than its socket.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

from core.accepting import Accepting
from core.errors import InvalidRequest
from edge.api.openai_render import error_body

_log = logging.getLogger("skerry.tls")

HANDSHAKE = 0x16
"""The first byte of whoever begins one."""
GOODBYE_S = 3.0
"""For the other side to close its end of TLS too, and for a refusal to be read."""

_Protocols = Callable[[], asyncio.Protocol]


class TlsDoor:
    """`context` is asked for each caller, so that a new certificate holds from the next one on.
    `handshake_s` is for the first byte and the handshake together. Closes `listener` at the end."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: _Protocols,
        *,
        context: Callable[[], ssl.SSLContext],
        handshake_s: float,
    ) -> None:
        self._protocol = protocol
        self._context = context
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._shaking: set[asyncio.Task[None]] = set()
        self._accepting = Accepting(listener, self._shake, of="https")

    @property
    def shaking(self) -> int:
        """Callers who are accepted and whose handshake is under way."""
        return len(self._shaking)

    def take_in(self) -> None:
        """All who wait in the queue."""
        self._accepting.take_in()

    def close(self) -> None:
        """Accept nothing more. Handshakes under way go on. Idempotent."""
        self._accepting.close()

    async def hang_up(self) -> None:
        """Close, and break off the handshakes that are under way."""
        self.close()
        for task in self._shaking:
            task.cancel()
        if self._shaking:
            await asyncio.wait(self._shaking)

    def _shake(self, caller: socket.socket) -> None:
        caller.setblocking(False)
        if caller.family != socket.AF_UNIX:
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each piece at once
        task = self._loop.create_task(self._welcome(caller))
        self._shaking.add(task)
        task.add_done_callback(self._shaking.discard)

    async def _welcome(self, caller: socket.socket) -> None:
        """Its socket is the connection's from the handshake on, and closed where there is none."""
        end = self._loop.time() + self._handshake_s
        try:
            async with asyncio.timeout_at(end):
                first = await self._first_byte(caller)
        except (OSError, TimeoutError):
            caller.close()
            return
        except BaseException:
            caller.close()
            raise
        if not first:
            caller.close()
            return
        try:
            if first[0] != HANDSHAKE:
                await self._loop.connect_accepted_socket(PlainSpoken, caller)
                return
            await self._loop.connect_accepted_socket(
                self._protocol,
                caller,
                ssl=self._context(),
                ssl_handshake_timeout=max(0.001, end - self._loop.time()),
                ssl_shutdown_timeout=GOODBYE_S,
            )
        except OSError as error:  # also ssl.SSLError, and a handshake that took too long
            _log.debug("handshake failed why=%s", error)

    async def _first_byte(self, caller: socket.socket) -> bytes:
        """Still to be read; empty where the caller has closed. Raises OSError."""
        while True:
            try:
                return caller.recv(1, socket.MSG_PEEK)
            except (BlockingIOError, InterruptedError):
                pass
            came = self._loop.create_future()
            self._loop.add_reader(caller.fileno(), _settle, came)
            try:
                await came
            finally:
                self._loop.remove_reader(caller.fileno())


class PlainSpoken(asyncio.Protocol):
    """Tells a caller that this port speaks https, and closes once that is read."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._told: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._told is not None:
            return  # the rest of its request: a close before it is read would take the answer away
        status = HTTPStatus.BAD_REQUEST
        body = error_body(InvalidRequest("This port speaks https: use an https:// URL."))
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        self._told = loop.call_later(GOODBYE_S, self._transport.abort)
        self._transport.write(head.encode() + body)
        self._transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._told is not None:
            self._told.cancel()


def _settle(came: asyncio.Future[None]) -> None:
    if not came.done():
        came.set_result(None)
