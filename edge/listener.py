"""Limits on what precedes a request's body: how long its head may take to come, and how large it
may be. uvicorn has neither.

A guard stands between the transport and uvicorn's protocol, so that either of its parsers may be
the one inside. Bytes that come while no request's body is awaited belong to a head; they are fed on
in pieces that end where the limit does, so that the limit is exact.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Protocol, cast

from uvicorn.config import Config
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import ServerState

from core.errors import BodyTooLarge, RequestError, RequestTimeout
from edge.api.openai_render import error_body
from edge.cork import Corked

MAX_HEAD_BYTES = 16 << 10
"""No more than h11 takes by itself, whose refusal is a 400."""


class _Cycle(Protocol):
    """A request in uvicorn's protocol, from its head on."""

    more_body: bool
    response_complete: bool


class _Inner(Protocol):
    """What is used of uvicorn's protocols. `cycle`: of the newest request, None before the
    first."""

    cycle: _Cycle | None

    def connection_made(self, transport: asyncio.Transport) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class HeadGuard(asyncio.Protocol):
    def __init__(self, inner: _Inner, *, head_s: float, max_bytes: int) -> None:
        self._inner = inner
        self._head_s = head_s
        self._max_bytes = max_bytes
        self._came = 0
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._inner.connection_made(cast("asyncio.Transport", Corked(self._transport)))
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._inner.connection_lost(exc)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        while data and not self._transport.is_closing():
            before = self._inner.cycle
            if before is not None and before.more_body and not before.response_complete:
                self._inner.data_received(data)
                return
            if self._timer is None and (before is None or before.response_complete):
                self._arm()
            room = self._max_bytes - self._came
            piece, data = data[:room], data[room:]
            self._came += len(piece)
            self._inner.data_received(piece)
            if self._inner.cycle is not before:
                self._disarm()
            elif self._came >= self._max_bytes:
                self._too_large(before)

    def _too_large(self, running: _Cycle | None) -> None:
        if running is not None and running.more_body:
            self._came = 0  # the rest of a body that was refused: thrown away, for as long as _arm
        elif running is not None and not running.response_complete:
            self._transport.abort()  # heads without end behind a request that is being answered
        else:
            error = BodyTooLarge(f"the request's head is over {self._max_bytes} bytes")
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, error)

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._head_s, self._late)

    def _disarm(self) -> None:
        self._came = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._transport.is_closing():
            return
        running = self._inner.cycle
        if not self._came or (running is not None and running.more_body):
            self._transport.close()  # opened ahead, or still on with a body that was refused
            return
        error = RequestTimeout(f"the request's head was not complete within {self._head_s:g} s")
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, error)

    def _refuse(self, status: HTTPStatus, error: RequestError) -> None:
        body = error_body(error)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._disarm()
        self._transport.write(head.encode() + body)
        self._transport.close()


def guarding(
    *,
    head_s: float,
    max_bytes: int = MAX_HEAD_BYTES,
    protocol: type[asyncio.Protocol] = AutoHTTPProtocol,
) -> type[asyncio.Protocol]:
    """A protocol for `uvicorn.Config(http=…)`, with one of uvicorn's inside."""

    class Guarded(HeadGuard):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],  # uvicorn's, passed on
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            inner = protocol(  # type: ignore[call-arg] # uvicorn declares its own as bare ones
                config=config, server_state=server_state, app_state=app_state, _loop=_loop
            )
            super().__init__(cast("_Inner", inner), head_s=head_s, max_bytes=max_bytes)

    return Guarded
