"""How fast KV leaves this node, measured on what was really sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.errors import TransferFailed
from core.kv.ticket import Ticket
from core.kv.transports.base import Carrier, Piece, Shipment

LEAST_BYTES = 64 << 10
"""Less than this measures the call, not the way."""
_WEIGHT = 0.2


class Bandwidth:
    """A moving average over transfers, each weighed alike. `bytes_per_s` is 0 until the first."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def note(self, moved: int, seconds: float) -> None:
        """`moved` bytes took `seconds` of sending, without the waiting for them to be computed."""
        if moved < LEAST_BYTES or seconds <= 0:
            return
        rate = moved / seconds
        if self.bytes_per_s:
            rate = self.bytes_per_s + _WEIGHT * (rate - self.bytes_per_s)
        self.bytes_per_s = rate


class MeasuredCarrier:
    """A carrier whose finished shipments are noted."""

    def __init__(self, carrier: Carrier, bandwidth: Bandwidth, clock: Callable[[], float]) -> None:
        self._carrier = carrier
        self._bandwidth = bandwidth
        self._clock = clock

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> Shipment:
        shipment = await self._carrier.open(ticket, model, failed)
        return _MeasuredShipment(shipment, self._bandwidth, self._clock)


class _MeasuredShipment:
    """Counts the time within `send` and `finish`: between them the blocks are computed."""

    def __init__(
        self, shipment: Shipment, bandwidth: Bandwidth, clock: Callable[[], float]
    ) -> None:
        self._shipment = shipment
        self._bandwidth = bandwidth
        self._clock = clock
        self._moved = 0
        self._seconds = 0.0

    async def send(self, pieces: Sequence[Piece]) -> None:
        began = self._clock()
        await self._shipment.send(pieces)
        self._seconds += self._clock() - began
        self._moved += sum(piece.size for piece in pieces)

    async def renew(self) -> None:
        await self._shipment.renew()

    async def finish(self, computed_tokens: int) -> None:
        began = self._clock()
        await self._shipment.finish(computed_tokens)
        self._bandwidth.note(self._moved, self._seconds + self._clock() - began)

    async def close(self) -> None:
        await self._shipment.close()
