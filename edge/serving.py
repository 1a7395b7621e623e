"""One worker process of an edge: a socket, a server, and an orderly end."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn

from core import log
from core.address import split_address
from core.config import World
from core.errors import ConfigError
from core.orders import RETIRE
from edge.app import admission_for, open_edge
from edge.crew.seat import ALONE, Seat
from edge.listener import guarding
from edge.workers.keeper import hosting

_log = logging.getLogger("skerry.edge")

GRACE_S = 20.0
"""How long answers may go on after SIGTERM."""
KEEP_ALIVE_S = 65
"""Longer than common clients keep idle connections: they close first, never write into a close."""
IDLE_S = 3.0
"""After which a kept connection of a process that retires is closed without having been told."""
BACKLOG = 2048
FILES = 65536
"""Open files wished for: a connection to a caller and one to a region for each request."""


def run_edge(world: World, name: str, seat: Seat = ALONE) -> int:
    """Serve until SIGTERM or SIGINT, then finish what runs. Returns the exit code."""
    log.setup(f"edge/{name}{seat.name}")
    _raise_limits()
    edge = world.topology.edge(name)
    listeners = [socket.socket(fileno=number) for number in seat.listeners]
    listeners = listeners or [_listen(seat.address or edge.listen, shared=seat.of > 1)]
    if seat.folder is not None:
        listeners.append(_listen_inside(seat))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(world, name, seat, listeners))
    return 0


async def _serve(world: World, name: str, seat: Seat, listeners: list[socket.socket]) -> None:
    admission = admission_for(world, seat.of)
    async with open_edge(world, name, admission=admission, seat=seat) as app:
        server = Server(
            uvicorn.Config(
                app,
                http=guarding(head_s=world.topology.limits.head_s),
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(GRACE_S),
            )
        )

        def stop() -> None:
            _log.info("edge draining in_flight=%d", admission.in_flight)
            server.force_exit = admission.draining  # asked twice: now
            admission.drain()
            server.should_exit = True

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        loop.add_signal_handler(RETIRE, server.retire)
        if seat.lifeline is not None:
            lifeline = seat.lifeline

            def orphaned() -> None:
                loop.remove_reader(lifeline)
                stop()

            loop.add_reader(lifeline, orphaned)  # nothing is ever written: it was closed
        _settle_memory()
        host, port = listeners[0].getsockname()[:2]
        async with hosting(world, name, f"{host}:{port}", when=seat.of == 1):
            _log.info("edge ready address=%s:%d", host, port)
            await server.serve(sockets=listeners)
        _log.info("edge stopped")


class Server(uvicorn.Server):
    """uvicorn that leaves signals to us: its own handling ends the process by the signal again,
    so that an orderly end would not exit 0."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._retiring = False
        self._listeners: list[socket.socket] = []
        self._last: set[asyncio.Task[object]] = set()
        self._idle: dict[Any, tuple[Any, float]] = {}
        """By connection: its newest request, and when it was found to be answered."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._listeners = list(sockets or ())
        await super().serve(sockets)

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
        for server, listener in zip(self.servers, self._listeners, strict=True):
            # A socket that workers share by SO_REUSEPORT has a queue of its own: who is in it when
            # it is closed is reset.
            self._take_in(listener)
            server.close()

    def _take_in(self, listener: socket.socket) -> None:
        """All who wait in its queue."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:  # nobody; or the one who did has gone
                return
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
        return ended or not (state.connections or state.tasks or self._last)


def _listen(address: str, *, shared: bool) -> socket.socket:
    host, port = split_address(address)
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=BACKLOG,
            reuse_port=shared,
        )
    except OSError as error:
        raise ConfigError(f"{address} cannot be listened on: {error.strerror}") from error


def _listen_inside(seat: Seat) -> socket.socket:
    """Where the edge's other workers come in. One that was started again finds its old socket."""
    path = seat.socket(seat.number)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def _settle_memory() -> None:
    """What is there once all is built stays for good: the collector need not walk it again, which
    takes 40 ms a time, and every stream waits for it."""
    gc.collect()
    gc.freeze()


def _raise_limits() -> None:
    """Idle connections take a file each, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        _log.info("open files limit=%d was=%d", wanted, soft)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; it has no build for Windows."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
