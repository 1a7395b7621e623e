"""Who computes what in the next step. Pure: commands and results in, plans and reports out.

    scheduler.run(…) … plan = scheduler.plan() … scheduler.apply(result) … scheduler.take()

Several plans may be made before the first result is applied; results come in the order of plans.

Rules
- Order of service is (priority, arrival), in the queue, for memory and for victims.
- A step holds all decodes first, then prompt chunks, then newcomers, up to its token budget.
- Admission takes all blocks of what is known of a sequence, and leaves a watermark for the growth
  of others. The queue is not jumped: while its head lacks memory nobody behind it takes any.
- A running sequence grows block by block. Without a block, the last in order of service that may
  lose its blocks loses them and is computed again later, from prompt and output alike. It never
  takes from those before it: it waits. So the first in order always progresses.
- Blocks that somebody outside fills (reserved) or reads (prefills) are never taken away, and blocks
  of a step in flight are not free before its result.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from core.engine.draft import Draft, Part
from core.engine.messages import PrefillProgress, Reserved, SequenceSpec, TokenOutput
from core.engine.plan import SequenceId, StepPlan, StepResult
from core.engine.reports import Counters, Reports
from core.engine.roster import Roster
from core.engine.sequence import Sequence, Status, refusal
from core.errors import InternalError, InvalidRequest, NoCapacity
from core.kv.block_manager import BlockManager, blocks_for
from core.kv.prefix_cache import CachedBlock, Hasher, TokenChain
from core.prefix import block_root, next_block_hash
from core.types import BLOCK_TOKENS

_WATERMARK_SHARE = 64
"""One block in so many stays free for growth when something is admitted beside others."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`context`: the model's, in tokens of prompt and answer together."""

    context: int
    vocab_size: int
    max_sequences: int
    max_step_tokens: int


class Scheduler:
    def __init__(
        self,
        limits: Limits,
        blocks: BlockManager,
        fingerprint: bytes,
        *,
        hasher: Hasher = next_block_hash,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.counters = Counters()
        pool_tokens = blocks.total * BLOCK_TOKENS
        self.context = min(limits.context, pool_tokens)
        """Tokens of prompt and answer that fit both the model and the pool."""
        self._pool_tokens = pool_tokens
        self._max_running = min(limits.max_sequences, limits.max_step_tokens)
        self._watermark = max(1, blocks.total // _WATERMARK_SHARE)
        self._fingerprint = fingerprint
        self._hasher = hasher
        self._arrivals = 0
        self._steps = 0
        self.roster = Roster(blocks)
        self._in_flight: deque[tuple[StepPlan, tuple[Part, ...]]] = deque()
        self._reports = Reports()

    # -------------------------------------------------------------- commands

    def run(self, sequence_id: SequenceId, spec: SequenceSpec) -> None:
        """Compute the prompt here and generate."""
        sequence = self._accept(sequence_id, spec, prefill_only=False)
        if sequence is None:
            return
        finish = sequence.finish(self.context)
        if finish is None:
            self.roster.enqueue(sequence)
            return
        self._reports.outputs.append(  # a continued request that had ended already
            TokenOutput(sequence=sequence.id, token_ids=(), finish=finish, computed_tokens=0)
        )

    def prefill(self, sequence_id: SequenceId, spec: SequenceSpec) -> None:
        """Compute the first n−1 tokens (of prompt and given output) and hold the blocks."""
        sequence = self._accept(sequence_id, spec, prefill_only=True)
        if sequence is not None and self._unfinished(sequence):
            self.roster.enqueue(sequence)

    def reserve(self, sequence_id: SequenceId, spec: SequenceSpec) -> None:
        """Set blocks aside for the first n−1 tokens; a Reserved or a refusal is reported at once.

        Nobody is preempted for it, and those that wait before it keep their claim.
        """
        sequence = self._accept(sequence_id, spec, prefill_only=False)
        if sequence is None or not self._unfinished(sequence):
            return
        count = blocks_for(len(sequence.tokens) - 1)
        start = self._cached_start(sequence)
        claimed = sum(
            blocks_for(other.goal) - len(other.table)
            for other in self.roster.waiting
            if other.key < sequence.key
        )
        if not self.blocks.fits(start, count, spare=self._spare() + claimed):
            refused = NoCapacity(
                f"{count} blocks of KV are wanted; {self.blocks.available} of {self.blocks.total} "
                f"are free and {claimed} of those are spoken for"
            )
            self._reports.fail(sequence_id, refused)
            return
        self._take_blocks(sequence, start, count)
        self.roster.reserve(sequence)
        fill = tuple(
            dict(enumerate(group[len(start) :], start=len(start)))
            for group in sequence.table.groups
        )
        self._reports.replies.append(
            Reserved(sequence=sequence_id, cached_tokens=sequence.computed, fill=fill)
        )

    def begin(self, sequence_id: SequenceId, *, kv_in_place: bool) -> None:
        """Generate on reserved blocks, which hold the KV of n−1 tokens or nothing new."""
        sequence = self.roster.get(sequence_id)
        if sequence is None:
            self._reports.fail(sequence_id, InternalError("nothing is reserved under this id"))
            return
        if sequence.status is not Status.RESERVED:
            raise InternalError(f"begin of {sequence_id}, which is {sequence.status.value}")
        if kv_in_place:
            sequence.computed = sequence.planned = sequence.seen = len(sequence.tokens) - 1
            self.blocks.register(sequence.table, sequence.chain, sequence.computed)
        self.roster.enqueue(sequence)

    def release(self, sequence_id: SequenceId) -> None:
        """A prefill's blocks are no longer read. Unknown ids are ignored."""
        sequence = self.roster.get(sequence_id)
        if sequence is None:
            return
        if not sequence.prefill_only:
            raise InternalError(f"release of {sequence_id}, which is no prefill")
        self.roster.leave(sequence)

    def abort(self, sequence_id: SequenceId) -> None:
        """Forget the sequence and say nothing more of it. Unknown ids are ignored."""
        sequence = self.roster.get(sequence_id)
        if sequence is not None:
            self.roster.leave(sequence)

    # -------------------------------------------------------------- a step

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now."""
        self._start_begun()
        while self._secure_growth():
            self._start_begun()  # a slot may have become free
        draft = Draft(self.limits.max_step_tokens)
        running = list(self.roster.running)
        for sequence in [
            *(one for one in running if one.remaining == 1),
            *(one for one in running if one.remaining > 1),
        ]:
            draft.add(sequence)
        self._admit_into(draft)
        if not draft.rows:
            return None
        self._steps += 1
        plan = StepPlan(self._steps, tuple(draft.rows))
        self._in_flight.append((plan, tuple(draft.parts)))
        return plan

    def apply(self, result: StepResult) -> None:
        """Take the oldest plan's result. Raises InternalError when it is another plan's."""
        if not self._in_flight or self._in_flight[0][0].number != result.number:
            raise InternalError(f"step {result.number} has a result and was not the next to end")
        _, parts = self._in_flight.popleft()
        given = {row.sequence: row for row in result.rows}
        for part in parts:
            sequence = part.sequence
            if not self.roster.landed(sequence):
                continue
            row = given.get(sequence.id)
            error = part.error(row, vocab_size=self.limits.vocab_size)
            if error is not None:
                self.blocks.distrust(sequence.table)
                self._reports.fail(sequence.id, InternalError(error))
                self.roster.leave(sequence)
            else:
                self._advance(part, row.token_id if row is not None else None)

    def take(self) -> Reports:
        """What happened since the last call."""
        reports, self._reports = self._reports, Reports()
        return reports

    # -------------------------------------------------------------- inside

    def _accept(
        self, sequence_id: SequenceId, spec: SequenceSpec, *, prefill_only: bool
    ) -> Sequence | None:
        if sequence_id in self.roster:
            raise InternalError(f"the sequence id {sequence_id} is in use already")
        refused = refusal(
            spec,
            context=self.limits.context,
            pool_tokens=self._pool_tokens,
            vocab_size=self.limits.vocab_size,
        )
        if refused is not None:
            self._reports.fail(sequence_id, refused)
            return None
        tokens = [*spec.token_ids, *spec.output_ids]
        self._arrivals += 1
        return Sequence(
            id=sequence_id,
            spec=spec,
            arrival=self._arrivals,
            prefill_only=prefill_only,
            tokens=tokens,
            chain=TokenChain(block_root(self._fingerprint, spec.namespace), tokens, self._hasher),
            table=self.blocks.new_table(),
        )

    def _unfinished(self, sequence: Sequence) -> bool:
        if sequence.finish(self.context) is None:
            return True
        self._reports.fail(
            sequence.id, InvalidRequest("nothing is left to generate", param="resume")
        )
        return False

    def _cached_start(self, sequence: Sequence) -> list[CachedBlock]:
        """What the prefix cache holds of it; never the last token, which is always computed."""
        return self.blocks.cache.find(sequence.chain, (len(sequence.tokens) - 1) // BLOCK_TOKENS)

    def _spare(self) -> int:
        """Blocks that an admission leaves: none when nobody else holds any."""
        return self._watermark if self.blocks.used else 0

    def _take_blocks(self, sequence: Sequence, start: list[CachedBlock], count: int) -> None:
        """Fill an empty table: the cached `start`, then new blocks up to `count`."""
        self.blocks.adopt(sequence.table, start)
        self.blocks.grow(sequence.table, count - len(start))
        cached = len(start) * BLOCK_TOKENS
        sequence.computed = sequence.planned = cached
        self.counters.cached_prompt += self._mark_seen(sequence, cached)

    def _mark_seen(self, sequence: Sequence, end: int) -> int:
        """How many prompt tokens before `end` were never in place before."""
        prompt = len(sequence.spec.token_ids)
        fresh = max(0, min(end, prompt) - min(sequence.seen, prompt))
        sequence.seen = max(sequence.seen, end)
        return fresh

    def _start_begun(self) -> None:
        """Those that have blocks in hand run as soon as there is a slot, whatever the queue's head
        waits for: their memory is spent already."""
        for sequence in [one for one in self.roster.waiting if len(one.table)]:
            if len(self.roster.running) >= self._max_running:
                return
            self.roster.start(sequence)

    def _secure_growth(self) -> bool:
        """Give every running sequence the blocks that its next row needs; did anyone lose some?"""
        preempted = False
        for sequence in list(self.roster.running):
            if sequence.status is not Status.RUNNING:
                continue
            need = blocks_for(sequence.goal) - len(sequence.table)
            while need > self.blocks.available:
                victim = self.roster.victim(sequence) or self._own_slot(sequence)
                if victim is None:
                    break
                self.roster.preempt(victim)
                self.counters.preemptions += 1
                preempted = True
            if sequence.status is Status.RUNNING and 0 < need <= self.blocks.available:
                self.blocks.grow(sequence.table, need)
        return preempted

    def _own_slot(self, sequence: Sequence) -> Sequence | None:
        """A sequence that cannot grow gives its own slot up for one before it that has blocks and
        no slot: else each would wait for what the other has."""
        blocked = any(len(one.table) and one.key < sequence.key for one in self.roster.waiting)
        return sequence if blocked and sequence.preemptible else None

    def _admit_into(self, draft: Draft) -> None:
        """Start the queue's head, one after the other, as long as there is room."""
        while draft.budget > 0 and len(self.roster.running) < self._max_running:
            head = next((one for one in self.roster.waiting if not len(one.table)), None)
            if head is None:
                return
            count = blocks_for(head.goal)
            start = self._cached_start(head)
            if not self.blocks.fits(start, count, spare=self._spare()):
                return
            self._take_blocks(head, start, count)
            self.roster.start(head)
            if head.prefill_only and (head.computed or not head.goal):
                self._progress(head)
            if head.status is Status.RUNNING:
                draft.add(head)

    def _advance(self, part: Part, token_id: int | None) -> None:
        sequence = part.sequence
        fresh = self._mark_seen(sequence, part.end)
        sequence.computed_prompt += fresh
        self.counters.computed_prompt += fresh
        sequence.computed = part.end
        self.blocks.register(sequence.table, sequence.chain, part.end)
        if sequence.prefill_only:
            self._progress(sequence)
        elif part.samples and token_id is not None:
            sequence.tokens.append(token_id)
            self.counters.generated += 1
            finish = sequence.finish(self.context)
            self._reports.outputs.append(
                TokenOutput(
                    sequence=sequence.id,
                    token_ids=(token_id,),
                    finish=finish,
                    computed_tokens=None if sequence.reported else sequence.computed_prompt,
                )
            )
            sequence.reported = True
            if finish is not None:
                self.roster.leave(sequence)

    def _progress(self, sequence: Sequence) -> None:
        complete = sequence.computed == sequence.goal
        self._reports.progress.append(
            PrefillProgress(
                sequence=sequence.id,
                ready_tokens=sequence.computed,
                computed_tokens=sequence.computed_prompt,
                complete=complete,
                blocks=sequence.table.view(sequence.goal),
            )
        )
        if complete:
            self.roster.hold(sequence)
