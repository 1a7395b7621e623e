"""Reserved blocks that this process fills itself, out of its own store, under the same machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from core.errors import TransferFailed
from core.kv.handoff import Incoming, Refusal
from core.kv.ticket import PieceKey


class Filling:
    """Every method raises TransferFailed when the transfer is over; what is written is whole pieces
    that were verified before."""

    def __init__(
        self,
        incoming: Incoming,
        places: Mapping[PieceKey, memoryview],
        model: bytes,
        clock: Callable[[], float],
    ) -> None:
        self.keys = tuple(sorted(places, key=lambda key: (key.block, key.rank, key.group)))
        """In order of the prompt's blocks."""
        self._incoming = incoming
        self._places = places
        self._clock = clock
        ticket = incoming.ticket
        if places:
            self._check(incoming.hello(ticket.id, ticket.generation, model, now=clock()))

    def size(self, key: PieceKey) -> int:
        """Bytes of a piece."""
        return self._incoming.size(key)

    def put(self, key: PieceKey, data: bytes | bytearray | memoryview) -> None:
        """Copy one piece, verified by the caller, into its place at once: no thread of ours ever
        writes into blocks that could be taken away meanwhile."""
        view = memoryview(data).cast("B")
        self._check(self._incoming.begin(key, len(view), now=self._clock()))
        self._places[key][:] = view
        self._check(self._incoming.end_piece(key, intact=True, now=self._clock()))

    def end(self) -> None:
        """All pieces have been put."""
        if self._places:
            self._check(self._incoming.end(0, now=self._clock()))

    def _check(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            raise TransferFailed(f"blocks cannot be filled: {refusal}")
