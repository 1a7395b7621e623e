"""KV that stays in one process: prefill and decode on the same node, and the twin for tests.

One copy per block. No checksum: nothing between source and destination could change a byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from core.errors import TransferFailed
from core.kv.handoff import Incoming, Refusal
from core.kv.ticket import Offer, Ticket
from core.kv.transports.base import Arrival, Piece


class MemoryHub:
    """Landing and Carrier in one."""

    def __init__(self, clock: Callable[[], float], *, address: str = "memory") -> None:
        self._clock = clock
        self._address = address
        self._arrivals: dict[int, Arrival] = {}
        self._failed: dict[int, Callable[[TransferFailed], None]] = {}

    @property
    def address(self) -> str:
        return self._address

    @property
    def offers(self) -> tuple[Offer, ...]:
        return ()

    def expect(self, arrival: Arrival) -> None:
        self._arrivals[arrival.incoming.ticket.generation] = arrival

    def withdraw(self, incoming: Incoming) -> None:
        generation = incoming.ticket.generation
        self._arrivals.pop(generation, None)
        failed = self._failed.pop(generation, None)
        if failed is not None and incoming.failure is not None:
            failed(TransferFailed(f"the receiver gave up: {incoming.failure}"))

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> MemoryShipment:
        arrival = self._arrivals.get(ticket.generation)
        if arrival is None:
            raise TransferFailed(f"the receiver refused: {Refusal.TICKET}")
        refusal = arrival.incoming.hello(ticket.id, ticket.generation, model, now=self._clock())
        if refusal is not None:
            if arrival.incoming.over:  # the hello found that the lease has run out
                self.settled(arrival)
            raise TransferFailed(f"the receiver refused: {refusal}")
        self._failed[ticket.generation] = failed
        return MemoryShipment(arrival, self._clock, self)

    def settled(self, arrival: Arrival) -> None:
        """The machine of `arrival` is READY or FAILED, or its sender has left: tell its owner."""
        generation = arrival.incoming.ticket.generation
        self._failed.pop(generation, None)
        if self._arrivals.get(generation) is arrival:
            del self._arrivals[generation]
            arrival.changed()


class MemoryShipment:
    """See `base.Shipment`."""

    def __init__(self, arrival: Arrival, clock: Callable[[], float], hub: MemoryHub) -> None:
        self._arrival = arrival
        self._incoming = arrival.incoming
        self._clock = clock
        self._hub = hub

    async def send(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._check(self._incoming.begin(piece.key, piece.size, now=self._clock()))
            place = self._arrival.places[piece.key]
            for part in piece.parts:
                place[: len(part)] = part
                place = place[len(part) :]
            self._check(self._incoming.end_piece(piece.key, intact=True, now=self._clock()))
            await asyncio.sleep(0)  # an abort comes between two blocks, never within one

    async def renew(self) -> None:
        self._check(self._incoming.renew(now=self._clock()))

    async def finish(self, computed_tokens: int) -> None:
        self._check(self._incoming.end(computed_tokens, now=self._clock()))
        self._hub.settled(self._arrival)

    async def close(self) -> None:
        if self._incoming.lost():
            self._hub.settled(self._arrival)

    def _check(self, refusal: Refusal | None) -> None:
        if refusal is None:
            return
        if self._incoming.failure is not None:
            self._hub.settled(self._arrival)
        raise TransferFailed(f"the receiver refused: {refusal}")
