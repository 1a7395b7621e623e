"""What a node awaits, whatever way it may come: shared by all its landings."""

from __future__ import annotations

from core.kv.handoff import Incoming
from core.kv.transports.base import Arrival


class Awaited:
    """Arrivals by the generation of their ticket."""

    def __init__(self) -> None:
        self._arrivals: dict[int, Arrival] = {}

    def expect(self, arrival: Arrival) -> None:
        self._arrivals[arrival.incoming.ticket.generation] = arrival

    def forget(self, incoming: Incoming) -> None:
        self._arrivals.pop(incoming.ticket.generation, None)

    def claim(self, generation: int) -> Arrival | None:
        return self._arrivals.get(generation)

    def settled(self, arrival: Arrival) -> None:
        """Its machine has become READY or FAILED on a connection: tell its owner, once."""
        if self._arrivals.pop(arrival.incoming.ticket.generation, None) is not None:
            arrival.changed()
