"""Composition of an edge: everything is built here and passed down.

`open_edge` holds connections and readers and gives the ASGI app; `serving` makes it a process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from litestar import Litestar
from litestar.types import ASGIApp
from prometheus_client import CollectorRegistry

from core.config import Edge, Region, World
from core.errors import ConfigError
from core.metrics import EdgeMetrics, StatusCollector, watch_certificate
from core.orders import orders_file, read_orders
from core.pins import pins_of
from core.public_tls import PublicCertificate
from core.release import release
from core.telemetry import open_telemetry
from core.tls import credentials_of, kept_fresh
from core.types import RegionName
from edge.admission import Admission
from edge.api.cors import cors
from edge.api.exchange import Desk
from edge.api.inside import inside_handlers
from edge.api.keys_page import keys_handler
from edge.api.openai import Intake
from edge.api.openapi import document
from edge.api.orders_page import orders_handlers
from edge.api.pages import Pages, exception_handlers, generation_handlers
from edge.api.status_page import Outlook
from edge.api.upload import BODIES_AT_ONCE, Uploads
from edge.api.workers_ai import RunIntake
from edge.api.workers_ai_batch import BatchDesk
from edge.api.workers_ai_routes import workers_ai_handlers
from edge.collector import Collector
from edge.crew.chorus import Chorus
from edge.crew.seat import ALONE, Seat
from edge.crew.siblings import NoSiblings, SocketSiblings
from edge.gateway import Gateway
from edge.hold import Hold
from edge.journal import Recent
from edge.page.files import read_files
from edge.page.handlers import page_handlers
from edge.page.neighbours import Neighbours
from edge.queue_client import HttpQueueClient, QueueClient
from edge.region_client import HttpRegionClient, RegionClient, RegionSession, new_session
from edge.region_routers import ManyRouters
from edge.routing.regions import Regions
from edge.routing.rings import Rings
from edge.tenants.opening import open_tenants
from edge.workers.opening import open_workers

_log = logging.getLogger("skerry.edge")

HEARTBEAT_S = 10.0


def admission_for(world: World, workers: int = 1) -> Admission:
    """As many requests as all regions together would queue: more would be refused there anyway."""
    topology = world.topology
    return Admission(-(-topology.limits.queue * len(topology.regions) // workers))


@asynccontextmanager
async def open_edge(
    world: World,
    name: str,
    *,
    admission: Admission,
    heartbeat_s: float = HEARTBEAT_S,
    seat: Seat = ALONE,
    public: PublicCertificate | None = None,
) -> AsyncIterator[ASGIApp]:
    """The edge `name` of `world` as an ASGI app; it listens to its regions until the context ends.

    Raises ConfigError.
    """
    topology, edge = world.topology, world.topology.edge(name)
    own, shared = CollectorRegistry(), CollectorRegistry()
    metrics = EdgeMetrics(own)
    recent = Recent(name, seat.number)
    version = release()
    credentials = credentials_of(world, name)
    secret, fleet_key = world.secret("region"), world.secret("fleet")
    hold = Hold(
        limit=topology.limits.hold,
        wait_s=topology.limits.hold_s,
        region_queue=topology.limits.queue,
    )
    async with (
        kept_fresh(credentials),
        new_session(credentials) as session,
        _config_errors_alone(),
        open_telemetry(topology.observe.otlp, "edge", name) as telemetry,
        asyncio.TaskGroup() as tasks,
        open_workers(world, name) as workers,
        open_tenants(world, name, tasks=tasks, agents=workers) as tenants,
    ):
        clients: dict[RegionName, RegionClient] = {
            RegionName(region.name): _client(
                region, session, secret, _delay_s(world, edge, region.name)
            )
            for region in topology.regions
        }
        regions = Regions(topology, edge, clients, told=hold.heard)
        gateway = Gateway(
            clients=clients,
            regions=regions,
            rings=Rings({RegionName(one.name): one.weight for one in topology.regions}),
            routing=topology.routing,
            fleet_key=fleet_key,
            metrics=metrics,
            tasks=tasks,
            hold=hold,
            residency=topology.residency_of,
        )
        _watch(shared, metrics, regions, admission, hold)
        if public is not None:
            watch_certificate(shared, lambda: public.left_s)
        chorus = Chorus(
            name,
            seat,
            siblings=SocketSiblings(seat, secret) if seat.of > 1 else NoSiblings(),
            own=own,
            shared=shared,
            admission=admission,
            hold=hold,
            recent=recent,
        )
        desk = Desk(
            edge=name,
            gateway=gateway,
            admission=admission,
            door=tenants.door,
            budgets=tenants.budgets,
            metrics=metrics,
            uploads=Uploads(
                limit=topology.limits.body_bytes,
                within_s=topology.limits.body_s,
                total=topology.limits.body_bytes * BODIES_AT_ONCE,
            ),
            expose_nodes=topology.routing.expose_nodes,
            heartbeat_s=heartbeat_s,
            recent=recent,
            telemetry=telemetry,
        )
        outlook = Outlook(topology, edge, regions, admission, int(time.time()), public)
        kept_orders = orders_file(world.state, name)
        admission.rest(read_orders(kept_orders).resting)
        intake = Intake(topology)
        queues = _queues(world, edge, session, secret)
        collector = Collector(queues, tenants.budgets, world.state / "collector.lock")
        batches = BatchDesk(
            desk=desk,
            topology=topology,
            intake=RunIntake(intake),
            regions=regions,
            clients=queues,
            collector=collector,
            fleet_key=fleet_key,
        )
        pages = Pages(
            door=tenants.door,
            outlook=outlook,
            chorus=chorus,
            openapi=document(version),
            version=version,
        )
        readers = [tasks.create_task(regions.run()), tasks.create_task(collector.run())]
        try:
            app = Litestar(
                route_handlers=[
                    *generation_handlers(desk, intake),
                    *workers_ai_handlers(desk, batches.intake, outlook, batches),
                    *pages.handlers(),
                    *inside_handlers(chorus, secret),
                    keys_handler(tenants.keyring, secret),
                    *orders_handlers(chorus, kept_orders, secret),
                    *page_handlers(
                        read_files(),
                        topology=topology,
                        outlook=outlook,
                        chorus=chorus,
                        door=tenants.door,
                        neighbours=_neighbours(world, name, session),
                        version=version,
                        secret=secret,
                    ),
                ],
                exception_handlers=exception_handlers(),
                cors_config=cors(edge.origins),
                openapi_config=None,
                logging_config=None,
            )
            yield app if workers is None else workers.before(app)
        finally:
            for reader in readers:
                reader.cancel()


@asynccontextmanager
async def _config_errors_alone() -> AsyncIterator[None]:
    """A task group wraps what its body raises: a lone ConfigError leaves as itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1 and isinstance(group.exceptions[0], ConfigError):
            raise group.exceptions[0] from None
        raise


def _neighbours(world: World, name: str, session: RegionSession) -> Neighbours:
    others = [one for one in world.topology.edges if one.name != name]
    pins = {one.name: pins for one in others if (pins := pins_of(world, one)) is not None}
    return Neighbours(others, session.http, pins=pins)


def _watch(
    shared: CollectorRegistry,
    metrics: EdgeMetrics,
    regions: Regions,
    admission: Admission,
    hold: Hold,
) -> None:
    """Gauges that are read when asked for."""
    StatusCollector(shared, regions.fresh_statuses)
    metrics.in_flight.set_function(lambda: float(admission.in_flight))
    metrics.held.set_function(lambda: float(hold.held))

    def up(name: RegionName) -> Callable[[], float]:
        return lambda: float(any(one.name == name and one.fresh for one in regions.view()))

    for region in regions.view():
        metrics.region_up.labels(region.name).set_function(up(region.name))


def _queues(
    world: World, edge: Edge, session: RegionSession, secret: bytes
) -> dict[RegionName, QueueClient]:
    return {
        RegionName(region.name): HttpQueueClient(
            RegionName(region.name),
            region.http,
            session.http,
            secret=secret,
            scheme=session.scheme,
            delay_s=_delay_s(world, edge, region.name),
        )
        for region in world.topology.regions
    }


def _client(region: Region, session: RegionSession, secret: bytes, delay_s: float) -> RegionClient:
    """One for each of its routers, and one over them where there are several."""
    name = RegionName(region.name)
    clients = [
        HttpRegionClient(name, router.http, session, secret=secret, delay_s=delay_s)
        for _, router in region.doors
    ]
    return clients[0] if len(clients) == 1 else ManyRouters(clients)


def _delay_s(world: World, edge: Edge, region: str) -> float:
    if not world.topology.routing.simulate_round_trips:
        return 0.0
    return edge.round_trip_ms.get(region, 0.0) / 1000.0
