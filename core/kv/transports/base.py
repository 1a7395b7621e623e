"""The seams between a node front and the ways that KV bytes travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import NamedTuple, Protocol

from core.errors import TransferFailed
from core.kv.geometry import KVGeometry
from core.kv.handoff import Incoming
from core.kv.ticket import Offer, PieceKey, Ticket

SHARED_MEMORY = "shared_memory"
TCP = "tcp"
TCP_TLS = "tcp+tls"
MOONCAKE = "mooncake"
"""Kinds of offers."""


class BlockMemory:
    """A rank's KV memory as one writable view per pool block. `descriptor`: of the memory, where a
    process on this host may map it; it must stay open as long as this object is used."""

    def __init__(
        self, geometry: KVGeometry, memory: mmap | bytearray, descriptor: int | None = None
    ) -> None:
        self.geometry = geometry
        self.view = memoryview(memory)
        self.descriptor = descriptor
        self._pools = [
            (geometry.pool_offset(index), group.block_bytes)
            for index, group in enumerate(geometry.groups)
        ]

    def start(self, group: int, block: int) -> int:
        """Where a block begins, in bytes."""
        offset, size = self._pools[group]
        return offset + block * size

    def block(self, group: int, block: int) -> memoryview:
        offset, size = self._pools[group]
        start = offset + block * size
        return self.view[start : start + size]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A transfer that is awaited: its machine, where each piece goes, and whom to tell.

    `changed` is called once, when the machine has become READY or FAILED through the transport.
    """

    incoming: Incoming
    places: Mapping[PieceKey, memoryview]
    changed: Callable[[], None]


class Span(NamedTuple):
    """`size` bytes from `offset` on, in the memory of our rank `rank`."""

    rank: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One block on its way, in the order of the receiver. `parts` are read until the shipment is
    finished or closed; `spans` say where they lie, for those that read from outside."""

    key: PieceKey
    parts: tuple[memoryview, ...]
    spans: tuple[Span, ...] = ()

    @property
    def size(self) -> int:
        return sum(len(part) for part in self.parts)


class Landing(Protocol):
    """The receiving side of a node."""

    @property
    def address(self) -> str:
        """What tickets say where to send."""
        ...

    @property
    def offers(self) -> tuple[Offer, ...]:
        """What tickets say how else to serve us, and how `address` can be used."""
        ...

    def expect(self, arrival: Arrival) -> None: ...

    def withdraw(self, incoming: Incoming) -> None:
        """Stop receiving for a transfer. Once this returns nobody writes into its blocks. A sender
        that is connected is told why: fail the machine first."""
        ...


class Shipment(Protocol):
    """One transfer that is being sent. Every method raises TransferFailed when the receiver has
    refused or is gone; `close` may be called at any time and more than once. Blocks that were sent
    may change only once `close` has been called: what it does first, and without waiting, is to
    make sure that nothing read later counts."""

    async def send(self, pieces: Sequence[Piece]) -> None: ...

    async def renew(self) -> None: ...

    async def finish(self, computed_tokens: int) -> None:
        """Say that all is sent and wait until the receiver has verified it."""
        ...

    async def close(self) -> None: ...


class Carrier(Protocol):
    """The sending side of a node."""

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> Shipment:
        """Present a ticket. Raises TransferFailed. `failed` is called at most once, when the
        receiver gives up while we are not waiting for it."""
        ...


def single_address(ticket: Ticket) -> str:
    """The one data socket that all endpoints of a ticket share. Raises TransferFailed."""
    addresses = {endpoint.address for endpoint in ticket.endpoints}
    if len(addresses) != 1:
        raise TransferFailed(f"a ticket with {len(addresses)} data sockets cannot be served")
    return addresses.pop()
