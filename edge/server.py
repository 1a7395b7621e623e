"""The edge's HTTP server: uvicorn, with https in front of it and with a way to retire."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import uvicorn

from core.accepting import Spell
from edge.tls_door import TlsDoor

_log = logging.getLogger("skerry.edge")

IDLE_S = 3.0
"""After which a kept connection of a process that retires is closed without having been told."""


@dataclass(frozen=True, slots=True)
class Https:
    """Sockets whose callers speak https; `context` is asked for each caller, `handshake_s` is how
    long one may take to begin."""

    listeners: Sequence[socket.socket]
    context: Callable[[], ssl.SSLContext]
    handshake_s: float


class Server(uvicorn.Server):
    """uvicorn that leaves signals to us: its own handling ends the process by the signal again,
    so that an orderly end would not exit 0."""

    def __init__(self, config: uvicorn.Config, https: Https | None = None) -> None:
        """The sockets that `serve` gets are in plaintext, those of `https` are not."""
        super().__init__(config)
        self._https = https
        self._retiring = False
        self._listeners: list[socket.socket] = []
        self._doors: list[TlsDoor] = []
        self._last: set[asyncio.Task[object]] = set()
        self._idle: dict[Any, tuple[Any, float]] = {}
        """By connection: its newest request, and when it was found to be answered."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._listeners = list(sockets or ())
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._https is not None:
            self._doors = [
                TlsDoor(
                    one,
                    self._protocol,
                    context=self._https.context,
                    handshake_s=self._https.handshake_s,
                )
                for one in self._https.listeners
            ]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for door in self._doors:
            await door.hang_up()
        await super().shutdown(sockets)

    def retire(self) -> None:
        """Accept nothing more, and end with the last connection. Idempotent."""
        if self._retiring:
            return
        self._retiring = True
        _log.info("edge retires connections=%d", len(self.server_state.connections))
        # Kept connections are not cut, since a request may be on its way: their next answer tells
        # the client to come anew.
        self.config.encoded_headers.append((b"connection", b"close"))
        self.server_state.default_headers = [
            *self.server_state.default_headers, (b"connection", b"close")
        ]  # fmt: skip
        if self._https is not None:  # what our own processes come in by stays open until the end
            for door in self._doors:
                door.take_in()
                door.close()
            return
        for server, listener in zip(self.servers, self._listeners, strict=True):
            # A socket that workers share by SO_REUSEPORT has a queue of its own: who is in it when
            # it is closed is reset.
            self._take_in(listener)
            server.close()

    def _take_in(self, listener: socket.socket) -> None:
        """All who wait in its queue, as far as there is room."""
        loop = asyncio.get_running_loop()
        spell = Spell("retiring")
        listener.setblocking(False)
        while True:
            try:
                caller, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if spell.pause_s(error):
                    return
                continue
            caller.setblocking(False)
            task: asyncio.Task[object] = loop.create_task(
                loop.connect_accepted_socket(self._protocol, caller)
            )
            self._last.add(task)
            task.add_done_callback(self._last.discard)

    def _protocol(self) -> asyncio.Protocol:
        """As uvicorn makes it for a connection."""
        kind = cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class)
        return kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def on_tick(self, counter: int) -> bool:
        ended = await super().on_tick(counter)
        if not self._retiring:
            return ended
        state = self.server_state
        for connection in state.connections - self._idle.keys():
            self._idle[connection] = (None, 0.0)
        for connection, (was, since) in list(self._idle.items()):
            cycle: Any = getattr(connection, "cycle", None)
            if connection not in state.connections:
                del self._idle[connection]
            elif cycle is not was or cycle is None or not cycle.response_complete:
                self._idle[connection] = (cycle, time.monotonic())
            elif time.monotonic() - since > IDLE_S:
                connection.shutdown()
        if self._https is None:
            return ended or not (state.connections or state.tasks or self._last)
        # A Worker that works for the process which stands beside would keep us for ever.
        callers = any(getattr(one, "scheme", None) == "https" for one in state.connections)
        return ended or not (callers or any(door.shaking for door in self._doors))
