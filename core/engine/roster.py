"""Where every sequence of a rank stands, and what changes with it. Decides nothing."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from core.engine.plan import SequenceId
from core.engine.sequence import Sequence, Status
from core.errors import InternalError
from core.kv.block_manager import BlockManager
from core.kv.prefix_cache import GONE
from core.types import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Gauges:
    """`running` hold blocks and are computed or sent; `waiting` have not begun."""

    running: int
    waiting: int
    prefill_backlog_tokens: int


class Roster:
    """`waiting` and `running` are in order of service; read them, change them by the methods."""

    def __init__(self, blocks: BlockManager) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._blocks = blocks
        self._known: dict[SequenceId, Sequence] = {}
        self._leaving: list[Sequence] = []  # gone, with rows in flight

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._known

    def get(self, sequence_id: SequenceId) -> Sequence | None:
        return self._known.get(sequence_id)

    def enqueue(self, sequence: Sequence) -> None:
        """A newcomer, or a reservation that has begun, waits."""
        self._known[sequence.id] = sequence
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_key)

    def reserve(self, sequence: Sequence) -> None:
        """A newcomer whose blocks a peer fills."""
        self._known[sequence.id] = sequence
        sequence.status = Status.RESERVED

    def keep(self, sequence: Sequence) -> None:
        """A newcomer that is never computed: its cached blocks are being sent."""
        self._known[sequence.id] = sequence
        sequence.status = Status.HELD

    def set_aside(self, sequence_id: SequenceId) -> tuple[dict[int, int], ...]:
        """Of each KV group, the blocks that a peer fills for a reserved sequence, by their index in
        it; nothing for any other."""
        sequence = self._known.get(sequence_id)
        if sequence is None or sequence.status is not Status.RESERVED:
            return ()
        cached = sequence.computed // BLOCK_TOKENS
        return tuple(
            {n: block for n, block in enumerate(group) if n >= cached and block != GONE}
            for group in sequence.table.groups
        )

    def start(self, sequence: Sequence) -> None:
        """From the queue to the running ones."""
        self.waiting.remove(sequence)
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_key)

    def hold(self, sequence: Sequence) -> None:
        """A running prefill is complete."""
        self.running.remove(sequence)
        sequence.status = Status.HELD

    def preempt(self, sequence: Sequence) -> None:
        """Take its blocks; it waits at its old place and computes everything again."""
        self._blocks.free(sequence.table)
        sequence.computed = sequence.planned = 0
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self.enqueue(sequence)

    def part(self, sequence: Sequence) -> None:
        """It is computed no more, and its blocks are read before it leaves."""
        queue = self.running if sequence.status is Status.RUNNING else self.waiting
        queue.remove(sequence)
        sequence.status = Status.HELD

    def victim(self, for_whom: Sequence) -> Sequence | None:
        """The last in order of service, behind `for_whom`, that may lose its blocks."""
        behind = (
            one
            for one in (*self.running, *self.waiting)
            if one.key > for_whom.key and one.preemptible
        )
        return max(behind, key=_key, default=None)

    def leave(self, sequence: Sequence) -> None:
        """Out of everything; its blocks too, as soon as no step in flight has them."""
        del self._known[sequence.id]
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        sequence.status = Status.FINISHED
        self._leaving.append(sequence)
        self._free_if_left(sequence)

    def landed(self, sequence: Sequence, *, samples: bool) -> bool:
        """A row of it came out of a step; does anybody still want the result?"""
        sequence.in_flight -= 1
        sequence.pending -= samples
        if sequence.status is not Status.FINISHED:
            return True
        self._free_if_left(sequence)
        return False

    def gauges(self) -> Gauges:
        everyone = self._known.values()
        running = sum(1 for one in everyone if one.status in (Status.RUNNING, Status.HELD))
        return Gauges(
            running=running,
            waiting=len(everyone) - running,
            prefill_backlog_tokens=sum(one.backlog for one in everyone),
        )

    def check_integrity(self) -> None:
        """Compare all books, those of the blocks too. Raises InternalError with the first
        disagreement."""
        everyone = [*self._known.values(), *self._leaving]
        self._blocks.check_integrity(one.table for one in everyone)
        for one in everyone:
            places = (one in self.waiting, one in self.running, one in self._leaving)
            status = one.status
            wanted = (
                status is Status.WAITING, status is Status.RUNNING, status is Status.FINISHED,
            )  # fmt: skip
            if places != wanted:
                raise InternalError(f"{one.id} is {status.value} and listed in {places}")
            if not 0 <= one.computed <= one.planned <= one.table.capacity:
                raise InternalError(
                    f"{one.id} has {one.computed} computed and {one.planned} planned positions "
                    f"in blocks for {one.table.capacity}"
                )
            if not 0 <= one.pending <= one.in_flight:
                raise InternalError(
                    f"{one.id} waits for {one.pending} tokens of {one.in_flight} steps"
                )
        if len(self.waiting) + len(self.running) > len(self._known):
            raise InternalError("a queue lists a sequence that is not known")

    def _free_if_left(self, sequence: Sequence) -> None:
        if not sequence.in_flight:
            self._leaving.remove(sequence)
            self._blocks.free(sequence.table)


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key
