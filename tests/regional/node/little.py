"""A region in one process: the real router, real fronts, real data sockets, ranks with a real
scheduler. What passes between them can be counted, and a fault put between any two steps."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from core.config import parse
from core.errors import TransferFailed
from core.events import Event, event_decoder
from core.kv.shards import PoolMemory
from core.kv.ticket import Ticket, model_digest
from core.kv.transports.base import TCP, Carrier, Piece, Shipment
from core.kv.transports.tcp import TcpLanding
from core.kv.transports.ways import Ways
from core.metrics import RouterMetrics
from regional.node.front import Front
from regional.node.pool import Pool
from regional.node.receiving import OwnHost, Receiving
from regional.node.seams import Sending
from regional.node.tiers.opening import NO_TIERS, TierSetup, open_tiers
from regional.pb import node_pb2 as pb
from regional.placement import Placement
from regional.reading import Reader
from regional.router import Router
from regional.rpc import NodeSession
from tests.regional.fake_node import MODEL
from tests.regional.fakes import ByteText, ask, no_prefixes, topology
from tests.regional.node.engine_rank import EngineRank, rank_config
from tests.regional.node.fakes import CONTEXT, VOCAB, FakeText
from tests.regional.node.little_parts import Forced, Steps

PATIENCE_S = 30.0


class CountedCarrier:
    """Sends piece by piece. `meddle` is asked before each, with the shipment and the piece."""

    def __init__(self, node: LittleNode, inner: Carrier) -> None:
        self._node = node
        self._inner = inner

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> Shipment:
        await self._node.hop("open")
        return CountedShipment(self._node, await self._inner.open(ticket, model, failed))


class CountedShipment:
    def __init__(self, node: LittleNode, inner: Shipment) -> None:
        self._node = node
        self.inner = inner

    async def send(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            await self._node.hop("piece")
            await self._node.meddle(self.inner, piece)

    async def renew(self) -> None:
        await self._node.hop("renew")
        await self.inner.renew()

    async def finish(self, computed_tokens: int) -> None:
        await self._node.hop("finish")
        await self.inner.finish(computed_tokens)

    async def close(self) -> None:
        await self.inner.close()


async def send_as_it_is(shipment: Shipment, piece: Piece) -> None:
    await shipment.send([piece])


class LittleNode:
    """A front, its rank and its session. `dead`: killed. Frozen: stopped by a signal."""

    def __init__(
        self, name: str, role: str, region: LittleRegion, *, lease_s: float, blocks: int,
        shards: int, apart: bool, transport: str, window: int, tiers: TierSetup,
    ) -> None:  # fmt: skip
        self.name, self.role, self.region = name, role, region
        self.rank = EngineRank(
            rank_config(blocks=blocks, window=window, shards=shards),
            lambda label: region.steps.hop(f"{name} {label}"),
        )
        self.ways = [
            Ways("127.0.0.1", (transport,), clock=time.monotonic)
            for _ in range(shards if apart else 1)
        ]
        """One, or one for each of its ranks, as if these were on hosts of their own."""
        self.meddle: Callable[[Shipment, Piece], Awaitable[None]] = send_as_it_is
        self.dead = False
        self.session: NodeSession | None = None
        self._lease_s, self._tier_setup = lease_s, tiers
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._epochs = itertools.count(1)
        self._up: asyncio.Future[Front] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live())
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        either: list[asyncio.Future[Any]] = [self._up, self._life]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._life.done():
            await self._life
        self.front = await self._up
        self.join()

    async def _live(self) -> None:
        digest = model_digest(self.rank.fingerprint)
        memory = self.rank.memory
        carrier = CountedCarrier(self, self.ways[0].carrier(memory))
        sending = Sending(self.rank, memory, carrier, digest, time.monotonic)
        hosts = [
            OwnHost(
                memory if len(self.ways) == 1 else PoolMemory({number: memory.ranks[number]}),
                ways.landing,
                digest,
                time.monotonic,
            )
            for number, ways in enumerate(self.ways)
        ]
        pool = Pool(0, self.rank, sending, Receiving(hosts, self._lease_s))
        try:
            async with asyncio.TaskGroup() as tasks:
                self.tiers = await open_tiers(
                    self._tier_setup, [pool], self.rank.fingerprint, lambda one: front.tell(one)
                )
                tasks.create_task(self.tiers.run())
                front = Front(
                    context=CONTEXT,
                    vocab_size=VOCAB,
                    text=FakeText(),
                    pools=[pool],
                    clock=time.monotonic,
                    tasks=tasks,
                    tiers=self.tiers,
                )
                self.rank.receive = partial(front.rank_said, 0)
                self._up.set_result(front)
                await asyncio.Event().wait()
        finally:
            for ways in self.ways:
                ways.close()
            self.rank.close()
            await self.tiers.close()

    # ------------------------------------------------------------ the session

    def join(self) -> None:
        """Join the router as a node that has just dialled."""
        stats = self.rank.engine.stats()
        message = pb.Join(
            wire=1, name=self.name, epoch=f"{self.name}{next(self._epochs)}", role=self.role,
            max_sequences=8, max_step_tokens=48,
            models=[
                pb.ModelOffer(
                    name=MODEL, fingerprint=self.rank.fingerprint, context=CONTEXT,
                    kv_bytes_per_token=64, blocks=stats.blocks_total,
                    prefill_tokens_per_s=100.0, decode_tokens_per_s=100.0,
                    tier_blocks=self.tiers.blocks,
                )
            ],
        )  # fmt: skip
        session = self.session = NodeSession(message, next(self.region.serials))
        self.region.router.joined(session)
        outbox = _Outbox(self, session)
        self.front.session_opened(outbox)
        self._tasks.append(asyncio.create_task(self._pump(session, outbox)))

    async def _pump(self, session: NodeSession, outbox: _Outbox) -> None:
        """What the router says, until the session is over; then the front hears of that."""
        ended = asyncio.create_task(session.wait_ended())
        said = asyncio.create_task(session.next_outgoing())
        try:
            while True:
                await asyncio.wait([said, ended], return_when=asyncio.FIRST_COMPLETED)
                if session.ended:
                    break
                message, said = said.result(), asyncio.create_task(session.next_outgoing())
                await self.hop(f"hears {message.WhichOneof('body')}")
                self.front.handle(message, outbox)
            await self._thawed.wait()
            outbox.closed = True
            self.front.session_closed(outbox)
        finally:
            ended.cancel()
            said.cancel()

    async def hop(self, label: str) -> None:
        """One step of this node, which does not come while it is frozen."""
        self.region.steps.hop(f"{self.name} {label}")
        await self._thawed.wait()

    # ------------------------------------------------------------ faults

    def kill(self) -> None:
        self.dead = self.rank.frozen = True
        self._life.cancel()
        for task in self._tasks:
            task.cancel()
        self.lose()

    def lose(self) -> None:
        """The router notices that the node does not live."""
        if self.session is not None:
            self.region.router.ended(self.session)

    def cut(self) -> None:
        """Every data connection to it breaks."""
        for landing in self._landings():
            for connection in tuple(landing._connections):
                if isinstance(landing, TcpLanding):
                    connection.close(None)
                else:
                    landing._connections[connection]._sock.shutdown(socket.SHUT_RDWR)

    def _landings(self) -> list[Any]:
        """There is no public view of what they hold."""
        return [one for ways in self.ways for one in getattr(ways.landing, "_all")]  # noqa: B009 - as said

    def freeze(self) -> None:
        self.rank.frozen = True
        self._thawed.clear()

    def thaw(self) -> None:
        self.rank.frozen = self.dead
        self._thawed.set()
        self.rank.wake()

    @property
    def at_home(self) -> bool:
        """Nothing of anybody's is left here."""
        awaited = [
            one.awaited if isinstance(one, TcpLanding) else one._desk.awaited
            for one in self._landings()
        ]
        arrivals = any(one._arrivals for one in awaited)
        return self.front.idle.is_set() and not arrivals and self.rank.used == 0

    async def close(self) -> None:
        for task in (*self._tasks, self._life):
            task.cancel()
        await asyncio.gather(*self._tasks, self._life, return_exceptions=True)


class _Outbox:
    def __init__(self, node: LittleNode, session: NodeSession) -> None:
        self.closed = False
        self._node, self._session = node, session

    def send(self, message: pb.NodeMessage) -> None:
        if self.closed or self._node.dead:
            return
        kind = message.WhichOneof("body")
        if kind != "cache_events":
            self._node.region.steps.hop(f"{self._node.name} says {kind}")
        asyncio.get_running_loop().call_soon(self._arrive, message)

    def _arrive(self, message: pb.NodeMessage) -> None:
        region = self._node.region
        if region.unheard is not None:
            region.unheard.append(partial(self._arrive, message))
        elif not self._session.ended:
            region.router.received(self._session, message)


class LittleRegion:
    """See `little_region`."""

    def __init__(self, nodes: Sequence[tuple[str, str]]) -> None:
        self.unheard: list[Callable[[], None]] | None = None
        """What a stopped router has not heard."""
        world = parse(topology(nodes))
        self.steps = Steps()
        self.serials = itertools.count(1)
        self.nodes: dict[str, LittleNode] = {}
        self.router = Router(
            world.region("here"),
            world.limits,
            reader=Reader(world, {MODEL: ByteText()}),
            metrics=RouterMetrics(CollectorRegistry()),
            prefixes=no_prefixes(),
            changed=lambda: None,
        )
        self.dispatcher = Forced(
            self.router.cluster,
            self.router.index,
            limit=64,
            split_min_tokens=64,
            changed=lambda: None,
        )
        self.router.dispatcher = self.dispatcher
        self._ids = itertools.count(1)

    def router_stops(self) -> None:
        """It hears nothing until `router_wakes`."""
        self.unheard = []

    def router_wakes(self) -> None:
        unheard, self.unheard = self.unheard or [], None
        for message in unheard:
            message()

    def router_dies(self) -> None:
        """Its sessions end; who asked it hears nothing more."""
        for node in self.nodes.values():
            if node.session is not None:
                node.session.end("killed by the test")

    async def answer(
        self, prompt: str, placed: Placement | None = None, *, max_tokens: int = 8
    ) -> list[Event]:
        """The whole stream of one request, whose first attempt goes where `placed` says."""
        decoder = event_decoder()
        events: list[Event] = []

        async def write(data: bytes) -> None:
            events.extend(decoder.feed(data))

        self.dispatcher.first = None if placed is None else lambda: placed
        request = ask(prompt, request_id=f"r{next(self._ids)}", max_tokens=max_tokens)
        async with asyncio.timeout(PATIENCE_S):
            await self.router.serve(request, write)
        return events

    @property
    def decoders(self) -> list[str]:
        """Decode nodes that the router has."""
        return [
            name
            for name, node in self.nodes.items()
            if node.role == "decode" and node.session is not None and not node.session.ended
        ]

    async def settled(self) -> None:
        """Every block of every living node comes home."""
        living = [node for node in self.nodes.values() if not node.dead]
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not all(node.at_home for node in living):
                    await asyncio.sleep(0.001)
        except TimeoutError:
            left = {
                node.name: (node.front.idle.is_set(), node.rank.used)
                for node in living
                if not node.at_home
            }
            raise AssertionError(f"left behind (idle, blocks used): {left}") from None


@asynccontextmanager
async def little_region(
    *nodes: tuple[str, str],
    lease_s: float = 5.0,
    blocks: int = 64,
    shards: dict[str, int] | None = None,
    apart: bool = False,
    transport: str = TCP,
    window: int = 0,
    tiers: dict[str, TierSetup] | None = None,
) -> AsyncIterator[LittleRegion]:
    """`nodes` are (name, role). When it ends everything must have come home."""
    region = LittleRegion(nodes)
    for name, role in nodes:
        region.nodes[name] = LittleNode(
            name, role, region, lease_s=lease_s, blocks=blocks, window=window,
            shards=(shards or {}).get(name, 1), apart=apart,
            transport=transport, tiers=(tiers or {}).get(name, NO_TIERS),
        )  # fmt: skip
    try:
        for node in region.nodes.values():
            await node.start()
        yield region
        for node in region.nodes.values():
            node.thaw()
        await region.settled()
    finally:
        for node in region.nodes.values():
            await node.close()
