"""Slots and blocks: who gets them and who loses them. Takes nothing from a step in flight.

Order of service is (priority, arrival). What someone loses is computed again later, from prompt and
output alike; nobody takes from those before it, so the first in order always progresses and two can
never take from each other in turn.

A sequence that would lose more than it is worth to compute here is given back to whoever sent it
(`SequenceSpec.move_min_tokens`): it goes on from its output at a node that a reader serves. Where
its blocks are to be copied first it parts from them a while later, and nobody else loses any
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from core.engine.messages import GivenBack
from core.engine.reports import Counters
from core.engine.roster import Roster
from core.engine.sequence import Sequence, Status
from core.kv.block_manager import BlockManager, blocks_for
from core.kv.prefix_cache import CachedBlock
from core.types import BLOCK_TOKENS

_WATERMARK_SHARE = 64
"""One block in so many stays free for growth when something is admitted beside others."""


class Room:
    """`given_back` is told of those that go on elsewhere."""

    def __init__(
        self,
        roster: Roster,
        blocks: BlockManager,
        counters: Counters,
        *,
        max_running: int,
        given_back: Callable[[GivenBack], None],
    ) -> None:
        self._roster = roster
        self._blocks = blocks
        self._counters = counters
        self._max_running = max_running
        self._given_back = given_back
        self._parting: list[Sequence] = []
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
                if self._blocks_are_coming:
                    break
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
        if not stuck or not able or self._blocks_are_coming:
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
        if not victims or not (self.slot or seated) or self._blocks_are_coming:
            return False
        wanted = count - len(start) + self._watermark
        if self._blocks.available + sum(self._blocks.alone(v.table) for v in victims) < wanted:
            return False
        if not self.slot:
            self._preempt(seated[-1])
            victims.remove(seated[-1])
        while victims and not self.admits(start, count) and not self._blocks_are_coming:
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
        if need > 0 and need > self._blocks.available:
            return True
        return self._blocks.lacking(sequence.table, sequence.planned + 1)

    def _grow(self, sequence: Sequence) -> None:
        if sequence.remaining > 0:
            need = blocks_for(sequence.goal) - len(sequence.table)
            if need > 0:
                self._blocks.grow(sequence.table, need)
            self._blocks.reach(sequence.table, sequence.planned + 1)

    @property
    def _blocks_are_coming(self) -> bool:
        """Somebody was preempted whose blocks are still being copied."""
        self._parting = [one for one in self._parting if one.status is Status.HELD]
        return bool(self._parting)

    def _preempt(self, victim: Sequence) -> None:
        self._counters.preemptions += 1
        lost = self._blocks.alone(victim.table) * BLOCK_TOKENS
        if 0 < victim.spec.move_min_tokens <= lost:
            self._give_back(victim)
        else:
            self._roster.preempt(victim)

    def _give_back(self, victim: Sequence) -> None:
        tokens = victim.computed // BLOCK_TOKENS * BLOCK_TOKENS
        if not victim.spec.keep_blocks or not self._blocks.sees(victim.table, tokens):
            tokens = 0  # a window has passed what a token there would see
        blocks = victim.table.view(tokens) if tokens else ()
        if tokens:
            self._roster.part(victim)
            self._parting.append(victim)
        else:
            self._roster.leave(victim)
        self._given_back(
            GivenBack(
                sequence=victim.id,
                computed_tokens=victim.computed_prompt,
                read_tokens=min(victim.seen, len(victim.spec.token_ids)),
                tokens=tokens,
                blocks=blocks,
            )
        )

    def _own_slot(self, sequence: Sequence) -> Sequence | None:
        """A sequence that cannot grow gives its own slot up for one before it that has blocks and
        no slot: else each would wait for what the other has."""
        waiting = self._roster.waiting
        blocked = any(len(one.table) and one.key < sequence.key for one in waiting)
        return sequence if blocked and sequence.preemptible else None
