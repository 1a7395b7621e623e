"""Composition of an edge: everything is built here and passed down.

`open_edge` holds connections and readers and gives the ASGI app; `run_edge` is the process: a
socket, a server, and an orderly end.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from litestar import Litestar
from prometheus_client import CollectorRegistry

from core import log
from core.address import split_address
from core.config import Edge, World
from core.errors import ConfigError
from core.metrics import EdgeMetrics, StatusCollector
from core.release import release
from core.types import RegionName
from edge.admission import Admission
from edge.api.exchange import Desk
from edge.api.openai import Intake
from edge.api.openapi import document
from edge.api.pages import Pages, exception_handlers, generation_handlers
from edge.api.status_page import Outlook
from edge.gateway import Gateway
from edge.region_client import HttpRegionClient, RegionClient, new_session
from edge.routing.regions import Regions
from edge.routing.ring import Ring

_log = logging.getLogger("skerry.edge")

HEARTBEAT_S = 10.0
GRACE_S = 20.0
"""How long answers may go on after SIGTERM."""
KEEP_ALIVE_S = 65
"""Longer than common clients keep idle connections: they close first, never write into a close."""


def admission_for(world: World) -> Admission:
    """As many requests as all regions together would queue: more would be refused there anyway."""
    topology = world.topology
    return Admission(topology.limits.queue * len(topology.regions))


@asynccontextmanager
async def open_edge(
    world: World, name: str, *, admission: Admission, heartbeat_s: float = HEARTBEAT_S
) -> AsyncIterator[Litestar]:
    """The edge `name` of `world` as an ASGI app; it listens to its regions until the context ends.

    Raises ConfigError.
    """
    topology, edge = world.topology, world.topology.edge(name)
    registry = CollectorRegistry()
    metrics = EdgeMetrics(registry)
    version = release()
    secret, fleet_key = world.secret("region"), world.secret("fleet")
    async with new_session() as session, asyncio.TaskGroup() as tasks:
        clients: dict[RegionName, RegionClient] = {
            RegionName(region.name): HttpRegionClient(
                RegionName(region.name),
                region.http,
                session,
                secret=secret,
                delay_s=_delay_s(world, edge, region.name),
            )
            for region in topology.regions
        }
        regions = Regions(topology, edge, clients)
        gateway = Gateway(
            clients=clients,
            regions=regions,
            ring=Ring({RegionName(one.name): one.weight for one in topology.regions}),
            routing=topology.routing,
            fleet_key=fleet_key,
            metrics=metrics,
            tasks=tasks,
            residency=topology.residency_of,
        )
        _watch(registry, metrics, regions, admission)
        desk = Desk(
            edge=name,
            gateway=gateway,
            admission=admission,
            metrics=metrics,
            body_limit=topology.limits.body_bytes,
            expose_nodes=topology.routing.expose_nodes,
            heartbeat_s=heartbeat_s,
        )
        pages = Pages(
            outlook=Outlook(topology, edge, regions, admission, int(time.time())),
            registry=registry,
            openapi=document(version),
            version=version,
            started=time.monotonic(),
        )
        reader = tasks.create_task(regions.run())
        try:
            yield Litestar(
                route_handlers=[*generation_handlers(desk, Intake(topology)), *pages.handlers()],
                exception_handlers=exception_handlers(),
                openapi_config=None,
                logging_config=None,
            )
        finally:
            reader.cancel()


def run_edge(world: World, name: str) -> int:
    """Serve until SIGTERM or SIGINT, then finish what runs. Returns the exit code."""
    log.setup(f"edge/{name}")
    edge = world.topology.edge(name)
    listener = _listen(edge)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(world, name, listener))
    return 0


async def _serve(world: World, name: str, listener: socket.socket) -> None:
    admission = admission_for(world)
    async with open_edge(world, name, admission=admission) as app:
        server = Server(
            uvicorn.Config(
                app,
                access_log=False,
                log_config=None,
                server_header=False,
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
        host, port = listener.getsockname()[:2]
        _log.info("edge ready address=%s:%d", host, port)
        await server.serve(sockets=[listener])
        _log.info("edge stopped")


class Server(uvicorn.Server):
    """uvicorn that leaves signals to us: its own handling ends the process by the signal again,
    so that an orderly end would not exit 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _watch(
    registry: CollectorRegistry, metrics: EdgeMetrics, regions: Regions, admission: Admission
) -> None:
    """Gauges that are read when asked for."""
    StatusCollector(registry, regions.fresh_statuses)
    metrics.in_flight.set_function(lambda: float(admission.in_flight))

    def up(name: RegionName) -> Callable[[], float]:
        return lambda: float(any(one.name == name and one.fresh for one in regions.view()))

    for region in regions.view():
        metrics.region_up.labels(region.name).set_function(up(region.name))


def _delay_s(world: World, edge: Edge, region: str) -> float:
    if not world.topology.routing.simulate_round_trips:
        return 0.0
    return edge.round_trip_ms.get(region, 0.0) / 1000.0


def _listen(edge: Edge) -> socket.socket:
    host, port = split_address(edge.listen)
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=2048,
        )
    except OSError as error:
        raise ConfigError(f"{edge.listen} cannot be listened on: {error.strerror}") from error


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; it has no build for Windows."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
