"""The router process: everything is built here, started, and stopped again."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack

import grpc
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry

from core import log as logs
from core.address import split_address
from core.batches import QUEUE_PRIORITY
from core.config import Region, World
from core.errors import ConfigError
from core.metrics import RouterMetrics, StatusCollector, render
from core.models.source import resolve_source
from core.orders import Orders, orders_file
from core.release import release
from core.status import RegionStatus
from core.telemetry import SILENT, Telemetry, open_telemetry
from core.text.model import load_text
from core.tls import credentials_of, kept_fresh
from core.types import ModelName, RegionName, Role
from regional import rpc
from regional.changing import TopologyHttp, only_at_start
from regional.http import RegionHttp
from regional.orders import OrderBook, OrdersHttp
from regional.prefixes import PUBLISHED_SHARE, Prefixes
from regional.purging import PurgeHttp
from regional.queue.http import QueueHttp
from regional.queue.kept import KeptQueue
from regional.queue.rules import Room
from regional.queue.store import Store
from regional.queue.worker import Worker
from regional.reading import Reader, TextModel
from regional.router import Router
from regional.rpc import SessionServer, server_options
from regional.scaling import Scaling
from regional.status import Publisher, can_answer, model_statuses, region_status

log = logging.getLogger("skerry.app")

DRAIN_GRACE_S = 10.0
"""How long running requests may go on after SIGTERM."""
COLD_SLOTS = 2
"""What a region counts with whose nodes are all off: half of it is for queued requests, and the
first of them brings a node."""
_CLOSE_S = 1.0


class RouterApp:
    """One region's router with its two listeners. `start` binds them, `stop` undoes it all."""

    def __init__(
        self,
        world: World,
        region: Region,
        texts: Mapping[ModelName, TextModel],
        *,
        name: str = "",
        telemetry: Telemetry = SILENT,
    ) -> None:
        """`name`: of this one of several routers of the region."""
        limits, secret = world.topology.limits, world.secret("region")
        self._world = world
        self._name = name or region.name
        self._region = region
        self._credentials = credentials_of(world, name or region.name)
        self._texts = dict(texts)
        self._epoch = secrets.token_hex(8)
        self._release = release()
        self._registry = CollectorRegistry()
        self._metrics = RouterMetrics(self._registry)
        StatusCollector(self._registry, lambda: (self._status(),))
        self._reader = Reader(world.topology, texts)
        self._prefixes = Prefixes(
            RegionName(region.name),
            self._epoch,
            holds=lambda block: self.router.index.holds(block),
            share=PUBLISHED_SHARE / len(world.topology.regions),
        )
        self.publisher = Publisher(self._status, self._prefixes)
        self.router = Router(
            region,
            limits,
            reader=self._reader,
            metrics=self._metrics,
            prefixes=self._prefixes,
            changed=self.publisher.touch,
            cold=lambda model: self.scaling.cold(model),
            telemetry=telemetry,
        )
        self.scaling = Scaling(
            region,
            cluster=self.router.cluster,
            dispatcher=self.router.dispatcher,
            demand=self.router.demand,
            metrics=self._metrics,
            changed=self.publisher.touch,
        )
        self._sessions = SessionServer(self.router, secret=secret, heartbeat_s=limits.heartbeat_s)
        self._http = RegionHttp(
            self.router,
            self.publisher,
            secret=secret,
            body_bytes=limits.body_bytes,
            ready=self._ready,
            metrics=self._rendered,
        )
        kept = KeptQueue(Store(world.state / f"queue-{name or region.name}.sqlite"))
        self._kept = kept
        self.queue = Worker(kept, self.router, look=self._room, deadline_s=limits.deadline_s)
        self._metrics.kept.set_function(lambda: float(self.queue.waiting))
        self._queue_http = QueueHttp(
            kept,
            check=self._http.check_secret,
            poke=self.queue.poke,
            body_bytes=limits.body_bytes,
            leaving=lambda: self._orders.now.leaving,
        )
        self._purge_http = PurgeHttp(
            self.router.purges,
            kept,
            stop=self.router.stop_namespace,
            check=self._http.check_secret,
        )
        self._orders = OrderBook(
            orders_file(world.state, name or region.name),
            {node.name for node in region.nodes},
            changed=self._ordered,
        )
        self._orders_http = OrdersHttp(self._orders, check=self._http.check_secret)
        self._topology_http = TopologyHttp(world, take=self.take, check=self._http.check_secret)
        self._running = AsyncExitStack()
        self.http_port = 0
        self.grpc_port = 0

    async def start(self) -> None:
        """Raises ConfigError when an address is taken; nothing is left running then."""
        async with AsyncExitStack() as starting:
            starting.push_async_callback(self._kept.close)
            self.grpc_port = await self._start_grpc(starting)
            self.http_port = await self._start_http(starting)
            await starting.enter_async_context(kept_fresh(self._credentials))
            for work in (
                self.router.watch(),
                self.publisher.run(),
                self.queue.run(),
                self.scaling.run(),
            ):
                starting.push_async_callback(_end, asyncio.create_task(work))
            self._running = starting.pop_all()
        log.info("region %s: http %d, grpc %d", self._region.name, self.http_port, self.grpc_port)

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Refuse new requests, let running ones end within `grace_s`, close all connections."""
        await self.router.drain(grace_s)
        await self._running.aclose()
        self._reader.close()

    async def take(self, world: World) -> None:
        """Go on with a changed topology; what runs goes on. Raises ConfigError for what only a
        start can take, InternalError for orders that cannot be kept; nothing has changed then."""
        given = world.topology
        fixed = list(only_at_start(self._world.topology, given, self._name))
        if fixed:
            raise ConfigError(f"a running router does not take another {', '.join(fixed)}")
        region = given.region(self._region.name)
        texts = await asyncio.to_thread(self._texts_for, world, region)
        self._orders.know({node.name for node in region.nodes})  # the last that may fail
        self._world, self._texts = world, texts
        self._region = msgspec.structs.replace(
            region, http=self._region.http, grpc=self._region.grpc
        )
        self._reader.take(given, texts)
        self._prefixes.share = PUBLISHED_SHARE / len(given.regions)
        self.router.take(region)
        self.scaling.take(region)
        self.publisher.touch()

    def _texts_for(self, world: World, region: Region) -> dict[ModelName, TextModel]:
        """Those that are there stay as they are where their source has not changed."""
        names = {ModelName(node.model) for node in region.nodes}
        kept = {
            name: text
            for name, text in self._texts.items()
            if name in names and self._world.model_source(name) == world.model_source(name)
        }
        return load_texts(world, names - kept.keys()) | kept

    async def _start_grpc(self, starting: AsyncExitStack) -> int:
        _check_free(self._region.grpc)
        server = grpc.aio.server(options=server_options())
        server.add_generic_rpc_handlers((self._sessions.handler(),))
        try:
            port = rpc.listen(server, self._region.grpc, self._credentials)
        except RuntimeError as error:
            raise ConfigError(f"{self._region.grpc} cannot be listened on: {error}") from error

        async def close() -> None:
            self._sessions.close()
            await server.stop(_CLOSE_S)

        await server.start()
        starting.push_async_callback(close)
        return port

    async def _start_http(self, starting: AsyncExitStack) -> int:
        runner = web.AppRunner(
            self._http.application(
                [
                    *self._queue_http.routes(),
                    *self._purge_http.routes(),
                    *self._orders_http.routes(),
                    *self._topology_http.routes(),
                ]
            ),
            handler_cancellation=True,  # a client that goes away ends its request
            access_log=None,
            shutdown_timeout=_CLOSE_S,
        )
        await runner.setup()
        starting.push_async_callback(runner.cleanup)
        host, port = split_address(self._region.http)
        try:
            context = None if self._credentials is None else self._credentials.server
            await web.TCPSite(runner, host, port, ssl_context=context).start()
        except OSError as error:
            raise ConfigError(
                f"{self._region.http} cannot be listened on: {error.strerror}"
            ) from error
        bound: int = runner.addresses[0][1]
        return bound

    def _status(self) -> RegionStatus:
        router = self.router
        view = router.cluster.view()
        return region_status(
            region=self._region.name,
            epoch=self._epoch,
            view=view,
            members=router.cluster.members(),
            nodes=self._region.nodes,
            models=model_statuses(view, self._texts, self._reader.context, self.scaling.start_s),
            queue_s=router.dispatcher.estimate_s(view),
            queued=router.dispatcher.queued,
            active=router.active,
            draining=router.draining,
            hits=router.hits,
            release=self._release,
            orders=self._orders.now,
            wanted=self.scaling.wanted,
            running=self.scaling.running,
        )

    def _ordered(self, orders: Orders) -> None:
        self.router.cluster.resting = frozenset(orders.nodes)
        self.publisher.touch()
        self.router.dispatcher.poke()

    def _room(self, held: int) -> Room:
        orders = self._orders.now
        decoders = self.router.cluster.view().decoders()
        return Room(
            slots=sum(node.max_sequences for node in decoders)
            or (COLD_SLOTS if self._region.scale else 0),
            taken=sum(node.sequences for node in decoders),
            waiting=self.router.dispatcher.waiting(QUEUE_PRIORITY),
            held=held,
            draining=self.router.draining or (orders.resting and not orders.leaving),
        )

    def _ready(self) -> bool:
        nodes = self.router.cluster.view().nodes
        return all(
            can_answer(nodes, model) or self.scaling.start_s(model) is not None
            for model in self._texts
        )

    def _rendered(self) -> bytes:
        nodes = self.router.cluster.view().nodes
        for role in Role:
            self._metrics.nodes.labels(role.value).set(
                sum(node.role is role and node.dp_rank == 0 for node in nodes)
            )
        return render(self._registry)


def run_router(world: World, name: str) -> int:
    """Be the router `name` until SIGTERM or SIGINT; asked twice, end at once. Raises
    ConfigError."""
    logs.setup(f"router/{name}", form=world.topology.observe.log)
    region, here = world.topology.router(name)
    region = msgspec.structs.replace(region, http=here.http, grpc=here.grpc)
    asyncio.run(_serve(world, region, name))
    return 0


async def _serve(world: World, region: Region, name: str) -> None:
    stopped = asyncio.Event()

    def signalled() -> None:
        if stopped.is_set():
            app.router.break_off()
        stopped.set()

    loop = asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, signalled)
    texts = load_texts(world, {ModelName(node.model) for node in region.nodes})
    async with open_telemetry(world.topology.observe.otlp, "router", name) as telemetry:
        app = RouterApp(world, region, texts, name=name, telemetry=telemetry)
        await app.start()
        await stopped.wait()
        log.info("draining, %d requests run", app.router.active)
        await app.stop(grace_s=DRAIN_GRACE_S)


def load_texts(world: World, names: Collection[ModelName]) -> dict[ModelName, TextModel]:
    """Tokenizer and chat template of each. Raises ConfigError."""
    return {name: load_text(resolve_source(world.model_source(name))) for name in sorted(names)}


def _check_free(address: str) -> None:
    """gRPC's own complaint about a taken port comes as lines of its C core on stderr."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{address} cannot be listened on: {error.strerror}") from error


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel one of our endless tasks; what it raised instead comes out here."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
