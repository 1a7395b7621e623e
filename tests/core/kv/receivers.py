"""A receiver with one reservation, over either transport."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from core.errors import TransferFailed
from core.kv.geometry import KVGeometry, KVGroup
from core.kv.handoff import Incoming, Phase
from core.kv.ticket import Endpoint, PieceKey, Ticket, model_digest, new_ticket_id
from core.kv.transports.base import Arrival, BlockMemory, Carrier, Landing, Piece, Shipment
from core.kv.transports.memory import MemoryHub
from core.kv.transports.tcp import TcpLanding
from core.kv.transports.tcp_send import TcpCarrier

MODEL = model_digest(b"model")
GROUPS = (
    KVGroup(name="full", layers=2, kv_heads=2, head_dim=64, dtype="float32"),
    KVGroup(name="window", kind="window", layers=1, kv_heads=1, head_dim=8, dtype="float32"),
)
GEOMETRY = KVGeometry(groups=GROUPS, blocks=(64, 64))
WAIT_S = 10.0


def phase_of(incoming: Incoming) -> Phase:
    """As a call, which a type checker does not take to give the same value twice."""
    return incoming.phase


@dataclass
class Side:
    """A receiver with one reservation. `failed` collects what the sender was told unasked."""

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

    def blocks(self, memory: BlockMemory) -> list[Piece]:
        """Every expected piece: prompt block n lies in the source's pool block n + 1."""
        keys = [key for endpoint in self.ticket.endpoints for key in endpoint.pieces()]
        return [Piece(key, (memory.block(key.group, key.block + 1),)) for key in keys]

    def received(self, key: PieceKey) -> bytes:
        return bytes(self.arrival.places[key])


def whole(piece: Piece) -> bytes:
    return b"".join(piece.parts)


def source_memory() -> BlockMemory:
    return BlockMemory(GEOMETRY, bytearray(os.urandom(GEOMETRY.pool_bytes)))


@asynccontextmanager
async def receiver(
    kind: str,
    *,
    blocks: tuple[int, ...] = (0, 1, 5),
    clock: Callable[[], float] = time.monotonic,
    lease_s: float = 30.0,
) -> AsyncIterator[Side]:
    hub = MemoryHub(clock)
    tcp = TcpLanding.listen("127.0.0.1", clock) if kind == "tcp" else None
    landing: Landing = tcp or hub
    ticket = Ticket(
        id=new_ticket_id(),
        generation=3,
        lease_s=lease_s,
        endpoints=tuple(
            Endpoint(0, landing.address, index, 1, 1, "float32", group.block_bytes, blocks)
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
    try:
        carrier: Carrier = TcpCarrier() if kind == "tcp" else hub
        yield Side(memory, arrival, ticket, landing, carrier, settled)
    finally:
        if tcp is not None:
            tcp.close()


async def send_all(shipment: Shipment, pieces: Sequence[Piece]) -> None:
    await shipment.send(pieces)
    await shipment.finish(0)
