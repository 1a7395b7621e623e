"""The seams between a node front and the ways that KV bytes travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Protocol

from core.errors import TransferFailed
from core.kv.geometry import KVGeometry
from core.kv.handoff import Incoming
from core.kv.ticket import PieceKey, Ticket


class BlockMemory:
    """A rank's KV memory as one writable view per pool block."""

    def __init__(self, geometry: KVGeometry, memory: mmap | bytearray) -> None:
        self.geometry = geometry
        self._view = memoryview(memory)

    def block(self, group: int, block: int) -> memoryview:
        start, end = self.geometry.block_span(group, block)
        return self._view[start:end]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A transfer that is awaited: its machine, where each piece goes, and whom to tell.

    `changed` is called once, when the machine has become READY or FAILED through the transport.
    """

    incoming: Incoming
    places: Mapping[PieceKey, memoryview]
    changed: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """One block on its way, in the order of the receiver. `parts` are read until `Shipment.send`
    returns."""

    key: PieceKey
    parts: tuple[memoryview, ...]

    @property
    def size(self) -> int:
        return sum(len(part) for part in self.parts)


class Landing(Protocol):
    """The receiving side of a node."""

    @property
    def address(self) -> str:
        """What tickets say where to send."""
        ...

    def expect(self, arrival: Arrival) -> None: ...

    def withdraw(self, incoming: Incoming) -> None:
        """Stop receiving for a transfer. Once this returns nobody writes into its blocks. A sender
        that is connected is told why: fail the machine first."""
        ...


class Shipment(Protocol):
    """One transfer that is being sent. Every method raises TransferFailed when the receiver has
    refused or is gone; `close` may be called at any time and more than once."""

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
