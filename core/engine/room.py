"""Slots and blocks: who gets them and who loses them. Takes nothing from a step in flight.

Order of service is (priority, arrival). What someone loses is computed again later, from prompt and
output alike; nobody takes from those before it, so the first in order always progresses and two can
never take from each other in turn.
"""

from __future__ import annotations

from core.engine.reports import Counters
from core.engine.roster import Roster
from core.engine.sequence import Sequence, Status
from core.kv.block_manager import BlockManager, blocks_for
from core.kv.prefix_cache import CachedBlock

_WATERMARK_SHARE = 64
"""One block in so many stays free for growth when something is admitted beside others."""


class Room:
    def __init__(
        self, roster: Roster, blocks: BlockManager, counters: Counters, *, max_running: int
    ) -> None:
        self._roster = roster
        self._blocks = blocks
        self._counters = counters
        self._max_running = max_running
        self._watermark = max(1, blocks.total // _WATERMARK_SHARE)

    @property
    def slot(self) -> bool:
        """Is there one?"""
        return len(self._roster.running) < self._max_running

    @property
    def spare(self) -> int:
        """Blocks that an admission leaves: none when nobody else holds any."""
        return self._watermark if self._blocks.used else 0

    def start_begun(self) -> None:
        """Those that have blocks in hand run as soon as there is a slot, whatever the queue's head
        waits for: their memory is spent already."""
        for sequence in [one for one in self._roster.waiting if len(one.table)]:
            if not self.slot:
                return
            self._roster.start(sequence)

    # -------------------------------------------------------------- growth

    def contested(self) -> bool:
        """Is there less than those who run need next, so that somebody may have to give?"""
        going = [one for one in self._roster.running if one.remaining > 0]
        need = sum(max(0, blocks_for(one.goal) - len(one.table)) for one in going)
        return need > self._blocks.available or any(self._lacks(one) for one in going)

    def secure(self) -> bool:
        """Give every running sequence the blocks that its next row needs; did anyone lose some?"""
        preempted = False
        for sequence in list(self._roster.running):
            while sequence.status is Status.RUNNING and self._lacks(sequence):
                victim = self._roster.victim(sequence) or self._own_slot(sequence)
                if victim is None:
                    break
                self._preempt(victim)
                preempted = True
            if sequence.status is Status.RUNNING and not self._lacks(sequence):
                self._grow(sequence)
        return preempted

    def untangle(self) -> bool:
        """Nobody can go on. A prefill cannot lose its blocks, so where it waits for a block of a
        window group, the last that can lose some does. False when that is not the matter."""
        stuck = any(one.prefill_only and self._lacks(one) for one in self._roster.running)
        everyone = (*self._roster.running, *self._roster.waiting)
        able = [one for one in everyone if one.preemptible]
        if not stuck or not able:
            return False
        self._preempt(max(able, key=lambda one: one.key))
        return True

    def for_guesses(self, sequence: Sequence, most: int) -> int:
        """Blocks for `most` more positions, as far as they are to spare: for how many there are."""
        need = blocks_for(sequence.goal + most) - len(sequence.table)
        if 0 < need <= self._blocks.available - self._watermark:
            self._blocks.grow(sequence.table, need)
        return min(most, sequence.table.capacity - sequence.goal)

    # -------------------------------------------------------------- admission

    def admits(self, start: list[CachedBlock], count: int) -> bool:
        return self.slot and self._blocks.fits(start, count, spare=self.spare)

    def lower(self, head: Sequence) -> bool:
        """Does anybody of a lower priority run?"""
        return any(one.key[0] > head.key[0] for one in self._roster.running)

    def make(self, head: Sequence, start: list[CachedBlock], count: int) -> bool:
        """Take slot and blocks for `head` from those of a lower priority, the last ones first.
        False, and nobody loses anything, when that would not do."""
        victims = self._lower(head)
        seated = [one for one in victims if one.status is Status.RUNNING]
        if not victims or not (self.slot or seated):
            return False
        wanted = count - len(start) + self._watermark
        if self._blocks.available + sum(self._blocks.alone(v.table) for v in victims) < wanted:
            return False
        if not self.slot:
            self._preempt(seated[-1])
            victims.remove(seated[-1])
        while victims and not self.admits(start, count):
            self._preempt(victims.pop())
        return self.admits(start, count)

    # -------------------------------------------------------------- inside

    def _lower(self, head: Sequence) -> list[Sequence]:
        """Whose priority is lower than that of `head` and who may lose blocks, in order."""
        everyone = sorted((*self._roster.running, *self._roster.waiting), key=lambda one: one.key)
        return [one for one in everyone if one.key[0] > head.key[0] and one.preemptible]

    def _lacks(self, sequence: Sequence) -> bool:
        if sequence.remaining <= 0:
            return False
        need = blocks_for(sequence.goal) - len(sequence.table)
        soon = sequence.planned + 1
        return need > self._blocks.available or self._blocks.lacking(sequence.table, soon)

    def _grow(self, sequence: Sequence) -> None:
        if sequence.remaining > 0:
            need = blocks_for(sequence.goal) - len(sequence.table)
            self._blocks.grow(sequence.table, max(0, need))
            self._blocks.reach(sequence.table, sequence.planned + 1)

    def _preempt(self, victim: Sequence) -> None:
        self._roster.preempt(victim)
        self._counters.preemptions += 1

    def _own_slot(self, sequence: Sequence) -> Sequence | None:
        """A sequence that cannot grow gives its own slot up for one before it that has blocks and
        no slot: else each would wait for what the other has."""
        waiting = self._roster.waiting
        blocked = any(len(one.table) and one.key < sequence.key for one in waiting)
        return sequence if blocked and sequence.preemptible else None
