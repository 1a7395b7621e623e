"""A receiver with one reservation, and a source, over any transport."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache

from core.errors import TransferFailed
from core.kv.geometry import KVGeometry, KVGroup
from core.kv.handoff import Incoming, Phase
from core.kv.memory import allocate
from core.kv.shards import PoolMemory
from core.kv.ticket import Endpoint, PieceKey, Ticket, model_digest, new_ticket_id
from core.kv.transports import mooncake
from core.kv.transports.awaited import Awaited
from core.kv.transports.base import (
    MOONCAKE,
    SHARED_MEMORY,
    TCP,
    TCP_TLS,
    Arrival,
    BlockMemory,
    Carrier,
    Landing,
    Piece,
    Shipment,
)
from core.kv.transports.memory import MemoryHub
from core.kv.transports.tcp import TcpLanding
from core.kv.transports.tcp_send import TcpCarrier
from core.kv.transports.ways import Ways
from core.kv.transports.words import Words
from tests.core.kv.certificates import self_made
from tests.servers import needed_mooncake

MODEL = model_digest(b"model")
GROUPS = (
    KVGroup(name="full", layers=2, kv_heads=2, head_dim=64, dtype="float32"),
    KVGroup(name="window", kind="window", layers=1, kv_heads=1, head_dim=8, dtype="float32"),
)
GEOMETRY = KVGeometry(groups=GROUPS, blocks=(64, 64))
WAIT_S = 30.0
STREAMS = "tcp, 3 streams"
KINDS = ["memory", TCP, STREAMS, TCP_TLS, SHARED_MEMORY, MOONCAKE]


def phase_of(incoming: Incoming) -> Phase:
    """As a call, which a type checker does not take to give the same value twice."""
    return incoming.phase


@dataclass
class Side:
    """A receiver with one reservation. `failed` collects what the sender was told unasked."""

    source: PoolMemory
    memory: bytearray
    arrival: Arrival
    ticket: Ticket
    landing: Landing
    carrier: Carrier
    settled: asyncio.Event
    failed: list[TransferFailed] = field(default_factory=list)

    @property
    def incoming(self) -> Incoming:
        return self.arrival.incoming

    def pieces(self) -> list[Piece]:
        """Every expected piece: prompt block n lies in the source's pool block n + 1."""
        keys = [key for endpoint in self.ticket.endpoints for key in endpoint.pieces()]
        return [self.piece(key, key.block + 1) for key in keys]

    def piece(self, key: PieceKey, block: int) -> Piece:
        runs = self.source.runs_for(self.ticket.endpoints[key.group])
        return self.source.piece(key, block, runs)

    def received(self, key: PieceKey) -> bytes:
        return bytes(self.arrival.places[key])


def whole(piece: Piece) -> bytes:
    return b"".join(piece.parts)


@dataclass
class Mooncake:
    """One engine for all tests: its end takes a second, and a peer that has read from it once does
    not hear of memory that is registered later."""

    engine: mooncake.Engine
    source: PoolMemory
    carrier: mooncake.MooncakeCarrier


@cache
def _mooncake() -> Mooncake:
    needed_mooncake()
    engine = mooncake.Engine(mooncake.start("127.0.0.1"), "127.0.0.1")
    source, words = source_memory(ExitStack()), Words()
    base = engine.register(memoryview(words.memory))
    return Mooncake(engine, source, mooncake.MooncakeCarrier(engine, source, words, base))


def source_memory(stack: ExitStack) -> PoolMemory:
    descriptor, memory = allocate(GEOMETRY.pool_bytes)
    stack.callback(os.close, descriptor)
    memory[:] = os.urandom(GEOMETRY.pool_bytes)
    return PoolMemory({0: BlockMemory(GEOMETRY, memory, descriptor)})


def ends(
    kind: str, clock: Callable[[], float], source: PoolMemory, stack: ExitStack
) -> tuple[Landing, Carrier]:
    """Both ends of a transport, as one process."""
    if kind == "memory":
        hub = MemoryHub(clock)
        return hub, hub
    if kind in (TCP, STREAMS):
        tcp = TcpLanding.listen("127.0.0.1", clock)
        stack.callback(tcp.close)
        return tcp, TcpCarrier(streams=3 if kind == STREAMS else None)
    if kind == MOONCAKE:
        landing = mooncake.listen(_mooncake().engine, "127.0.0.1", clock, Awaited())
        stack.callback(landing.close)
        return landing, _mooncake().carrier
    tls = self_made() if kind == TCP_TLS else None
    ways = Ways("127.0.0.1", (TCP if tls else kind,), clock=clock, tls=tls)
    stack.callback(ways.close)
    return ways.landing, ways.carrier(source)


@asynccontextmanager
async def receiver(
    kind: str,
    *,
    blocks: tuple[int, ...] = (0, 1, 5),
    clock: Callable[[], float] = time.monotonic,
    lease_s: float = 30.0,
) -> AsyncIterator[Side]:
    with ExitStack() as stack:
        source = _mooncake().source if kind == MOONCAKE else source_memory(stack)
        landing, carrier = ends(kind, clock, source, stack)
        ticket = Ticket(
            id=new_ticket_id(),
            generation=3,
            lease_s=lease_s,
            endpoints=tuple(
                Endpoint(
                    0,
                    landing.address,
                    index,
                    group.layers,
                    group.kv_heads,
                    group.dtype,
                    group.block_bytes,
                    blocks,
                    offers=landing.offers,
                )
                for index, group in enumerate(GROUPS)
            ),
        )
        memory = bytearray(GEOMETRY.pool_bytes)
        view = BlockMemory(GEOMETRY, memory)
        settled = asyncio.Event()
        keys = [key for endpoint in ticket.endpoints for key in endpoint.pieces()]
        places = {key: view.block(key.group, 40 + key.block) for key in keys}

        def changed() -> None:
            assert not settled.is_set(), "changed is called once"
            settled.set()

        arrival = Arrival(Incoming(ticket, MODEL, now=clock()), places, changed)
        landing.expect(arrival)
        yield Side(source, memory, arrival, ticket, landing, carrier, settled)


async def send_all(shipment: Shipment, pieces: Sequence[Piece]) -> None:
    await shipment.send(pieces)
    await shipment.finish(0)
