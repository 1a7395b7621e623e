"""One worker process of an edge: a socket, a server, and an orderly end."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import logging
import resource
import signal
import socket
from collections.abc import Callable

import uvicorn

from core import log
from core.address import split_address
from core.config import World
from core.errors import ConfigError
from core.orders import RETIRE
from core.public_tls import PublicCertificate, kept_public, public_of
from edge.app import admission_for, open_edge
from edge.crew.seat import ALONE, Seat
from edge.listener import guarding
from edge.server import Https, Server
from edge.workers.keeper import hosting

_log = logging.getLogger("skerry.edge")

GRACE_S = 20.0
"""How long answers may go on after SIGTERM."""
KEEP_ALIVE_S = 65
"""Longer than common clients keep idle connections: they close first, never write into a close."""
NEAR = "127.0.0.1:0"
"""Where the host of Workers comes in, in plaintext, when callers speak https."""
BACKLOG = 2048
FILES = 65536
"""Open files wished for: a connection to a caller and one to a region for each request."""


def run_edge(world: World, name: str, seat: Seat = ALONE) -> int:
    """Serve until SIGTERM or SIGINT, then finish what runs. Returns the exit code. Raises
    ConfigError."""
    log.setup(f"edge/{name}{seat.name}", form=world.topology.observe.log)
    _raise_limits()
    edge = world.topology.edge(name)
    public = public_of(world, name)
    listeners = [socket.socket(fileno=number) for number in seat.listeners]
    listeners = listeners or [_listen(seat.address or edge.listen, shared=seat.of > 1)]
    plain = [socket.socket(fileno=number) for number in seat.plain]
    if seat.plain_address is not None:
        plain.append(_listen(seat.plain_address, shared=True))
    elif public is not None and edge.admin is not None:
        plain.append(_listen(NEAR, shared=False))
    if seat.folder is not None:
        plain.append(_listen_inside(seat))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(world, name, seat, public, listeners, plain))
    return 0


async def _serve(
    world: World,
    name: str,
    seat: Seat,
    public: PublicCertificate | None,
    listeners: list[socket.socket],
    plain: list[socket.socket],
) -> None:
    admission = admission_for(world, seat.of)
    async with (
        kept_public(public),
        open_edge(world, name, admission=admission, seat=seat, public=public) as app,
    ):
        head_s = world.topology.limits.head_s
        https = None if public is None else Https(listeners, public.current, head_s)
        server = Server(
            uvicorn.Config(
                app,
                http=guarding(head_s=head_s),
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(GRACE_S),
            ),
            https,
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
        near = _shown(listeners[0] if public is None or not plain else plain[-1])
        here = _shown(listeners[0])
        async with hosting(world, name, here, near=near, when=seat.of == 1):
            _log.info("edge ready address=%s%s", "" if public is None else "https://", here)
            await server.serve(plain if public is not None else [*listeners, *plain])
        _log.info("edge stopped")


def _shown(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
