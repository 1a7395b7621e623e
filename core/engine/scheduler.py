"""Who computes what in the next step. Pure: commands and results in, plans and reports out.

    scheduler.run(…) … plan = scheduler.plan() … scheduler.apply(result) … scheduler.take()

Several plans may be made before the first result is applied; results come in the order of plans. A
row may build on the token that the plan before it samples. An end that shows only then is seen one
plan late: the extra token is dropped, and its blocks are free once that step is over.

Rules
- Order of service is (priority, arrival), in the queue, for memory and for victims.
- A step holds all decodes first, with the guesses that are worth checking, then prompt chunks, then
  newcomers, up to its token budget; beside decodes, prompts have a bound of time too.
- Admission takes all blocks of what is known of a sequence, and leaves a watermark for the growth
  of others. The queue is not jumped: while its head lacks memory nobody behind it takes any. For a
  head of a higher priority, those of a lower one give way, if that makes room for it.
- A running sequence grows block by block. Without a block, the last in order of service that may
  lose its blocks loses them and is computed again later, from prompt and output alike, or is given
  back (`room`). It never takes from those before it: it waits. So the first in order always
  progresses.
- Blocks that somebody outside fills (reserved) or reads (prefills) are never taken away, and blocks
  of a step in flight are not free before its result.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from core.engine.cost import StepCost
from core.engine.draft import Draft, Part
from core.engine.guessing import Guessing
from core.engine.intake import Intake, Limits
from core.engine.lending import Lending, whole_blocks
from core.engine.messages import PrefillProgress, Reserved, SequenceSpec, TokenOutput
from core.engine.plan import RowResult, Scores, SequenceId, StepPlan, StepResult
from core.engine.reports import Counters, Reports
from core.engine.room import Room
from core.engine.roster import Roster
from core.engine.sequence import Sequence, Status
from core.engine.shares import decoding, prompt_share
from core.errors import DeadlineExceeded, InternalError, InvalidRequest
from core.kv.block_manager import BlockManager, blocks_for
from core.kv.prefix_cache import CachedBlock, Hasher
from core.prefix import next_block_hash
from core.types import BLOCK_TOKENS


class Scheduler:
    def __init__(
        self,
        limits: Limits,
        blocks: BlockManager,
        fingerprint: bytes,
        *,
        hasher: Hasher = next_block_hash,
        cost: StepCost | None = None,
        guessing: Guessing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.counters = Counters()
        self._intake = Intake(limits, blocks, fingerprint, hasher=hasher, clock=clock)
        self.context = self._intake.context
        self._cost = cost
        self._guessing = guessing
        self._clock = clock
        self._steps = 0
        self.roster = Roster(blocks)
        self._room = Room(
            self.roster,
            blocks,
            self.counters,
            max_running=min(limits.max_sequences, limits.max_step_tokens),
            given_back=lambda one: self._reports.given_back.append(one),
        )
        self._lending = Lending(self.roster, blocks, lambda: self._room.spare)
        self._in_flight: deque[tuple[StepPlan, tuple[Part, ...]]] = deque()
        self._reports = Reports()

    # -------------------------------------------------------------- commands

    def run(self, sequence_id: SequenceId, spec: SequenceSpec) -> None:
        """Compute the prompt here and generate."""
        sequence = self._accept(sequence_id, spec, prefill_only=False)
        if sequence is None:
            return
        finish = sequence.finish()
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
        reserved = self._lending.set_aside(sequence, len(sequence.tokens) - 1)
        if isinstance(reserved, Reserved):
            self.counters.cached_prompt += self._mark_seen(sequence, sequence.computed)
        self._reports.reply(sequence_id, reserved)

    def bring(
        self, sequence_id: SequenceId, token_ids: tuple[int, ...], namespace: str, *, priority: int
    ) -> None:
        """Set aside what the cache lacks of whole blocks; Reserved or a refusal is reported."""
        spec = whole_blocks(token_ids, namespace, priority=priority)
        sequence = self._accept(sequence_id, spec, prefill_only=True)
        if sequence is not None:
            self._reports.reply(sequence_id, self._lending.set_aside(sequence, len(token_ids)))

    def adopt(self, sequence_id: SequenceId, tokens: int) -> None:
        """The first `tokens` of an import are in place. Unknown ids are ignored."""
        sequence = self.roster.get(sequence_id)
        if sequence is not None:
            self._lending.adopt(sequence, tokens)

    def hold(self, sequence_id: SequenceId, token_ids: tuple[int, ...], namespace: str) -> None:
        """Keep what the cache has of whole blocks until it is released; reported as Held."""
        spec = whole_blocks(token_ids, namespace)
        sequence = self._accept(sequence_id, spec, prefill_only=True)
        if sequence is not None:
            self._reports.replies.append(self._lending.hold(sequence))

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
        elif not self.blocks.sees(sequence.table, sequence.computed):
            self.roster.preempt(sequence)  # a window's blocks were set aside for the end only
        self.roster.enqueue(sequence)

    def release(self, sequence_id: SequenceId) -> None:
        """The blocks of a prefill, or of one that was given back, are no longer read. Unknown ids
        are ignored."""
        sequence = self.roster.get(sequence_id)
        if sequence is None:
            return
        if not sequence.prefill_only and sequence.status is not Status.HELD:
            raise InternalError(f"release of {sequence_id}, whose blocks nobody reads")
        self.roster.leave(sequence)

    def abort(self, sequence_id: SequenceId) -> None:
        """Forget the sequence and say nothing more of it. Unknown ids are ignored."""
        sequence = self.roster.get(sequence_id)
        if sequence is not None:
            self.roster.leave(sequence)

    def expire(self) -> None:
        """End what is past its deadline, unless a peer is filling or reading its blocks: the front
        has to stop that first, and it watches the deadline too."""
        now = self._clock()
        for sequence in (*self.roster.waiting, *self.roster.running):
            if sequence.deadline is not None and sequence.deadline <= now:
                self._reports.fail(sequence.id, DeadlineExceeded("the deadline passed"))
                self.roster.leave(sequence)

    @property
    def expires_in(self) -> float | None:
        """Seconds until `expire` has something to do."""
        everyone = (*self.roster.waiting, *self.roster.running)
        deadlines = [one.deadline for one in everyone if one.deadline is not None]
        return max(0.0, min(deadlines) - self._clock()) if deadlines else None

    # -------------------------------------------------------------- a step

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can be computed now.

        While steps are in flight, nothing is planned that had better wait for what they bring:
        rows with guesses, and whatever would take blocks from somebody.
        """
        self.expire()
        if self._in_flight and self._better_wait():
            return None
        self._room.start_begun()
        while self._room.secure():
            self._room.start_begun()  # a slot may have become free
        self._make_room()
        draft = self._draft()
        while not draft.rows and not self._in_flight and self._room.untangle():
            draft = self._draft()
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
            if not self.roster.landed(sequence, samples=part.samples):
                continue
            row = given.get(sequence.id)
            error = part.error(row, vocab_size=self.limits.vocab_size)
            if error is not None or row is None:
                self.blocks.distrust(sequence.table)
                self._reports.fail(sequence.id, InternalError(error or ""))
                self.roster.leave(sequence)
            else:
                self._advance(part, row)

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
        made = self._intake.make(sequence_id, spec, prefill_only=prefill_only)
        if isinstance(made, Sequence):
            return made
        self._reports.fail(sequence_id, made)
        return None

    def _unfinished(self, sequence: Sequence) -> bool:
        if sequence.finish() is None:
            return True
        self._reports.fail(
            sequence.id, InvalidRequest("nothing is left to generate", param="resume")
        )
        return False

    def _cached_start(self, sequence: Sequence) -> list[CachedBlock]:
        """What the prefix cache holds of it; never the last token, which is always computed."""
        most = (len(sequence.tokens) - 1) // BLOCK_TOKENS
        return self.blocks.usable(self.blocks.cache.find(sequence.chain, most))

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

    def _better_wait(self) -> bool:
        """Is something to be decided that the results of the steps in flight bear upon?"""
        if self._room.contested():
            return True
        head = self._head()
        if head is not None:
            start, count = self._cached_start(head), blocks_for(head.goal)
            if not self._room.admits(start, count) and self._room.lower(head):
                return True
        drafts = any(part.drafts for _, parts in self._in_flight for part in parts)
        return self._guessing is not None and self._guessing.waits(self.roster.running, drafts)

    def _draft(self) -> Draft:
        draft = Draft(self.blocks, self.limits.max_step_tokens)
        running = self.roster.running
        ones = decoding(running, self.limits.stages)
        guesses = self._guessing.choose(running, ones) if self._guessing is not None else {}
        for sequence in ones:
            guess = guesses.get(sequence, ())
            most = self._room.for_guesses(sequence, len(guess)) if guess else 0
            draft.add(sequence, guess[:most])
        cost, target = self._cost, self.limits.mixed_step_s
        if draft.rows and cost is not None and target:
            draft.chunk = min(draft.chunk, cost.prompt_tokens_within(target, draft.decode_tokens))
        draft.chunk = min(draft.chunk, prompt_share((*running, *self.roster.waiting), self.limits))
        for sequence in [one for one in running if one.remaining > 1]:
            draft.add(sequence)
        self._admit_into(draft)
        return draft

    def _head(self) -> Sequence | None:
        """The first of the queue that has no blocks yet."""
        return next((one for one in self.roster.waiting if not len(one.table)), None)

    def _make_room(self) -> None:
        """Let those of a lower priority give way to the queue's head."""
        head = self._head()
        if head is not None:
            start, count = self._cached_start(head), blocks_for(head.goal)
            if not self._room.admits(start, count):
                self._room.make(head, start, count)

    def _admit_into(self, draft: Draft) -> None:
        """Start the queue's head, one after the other, as long as there is room."""
        while min(draft.budget, draft.chunk) > 0:
            head = self._head()
            if head is None:
                return
            count = blocks_for(head.goal)
            start = self._cached_start(head)
            if not self._room.admits(start, count):
                return
            self._take_blocks(head, start, count)
            self.roster.start(head)
            if head.prefill_only and (head.computed or not head.goal):
                self._progress(head)
            if head.status is Status.RUNNING:
                draft.add(head)

    def _advance(self, part: Part, row: RowResult) -> None:
        sequence = part.sequence
        fresh = self._mark_seen(sequence, part.end)
        sequence.computed_prompt += fresh
        self.counters.computed_prompt += fresh
        gained = sequence.append(row.token_ids) if part.samples else 0
        sequence.computed = part.end + max(0, gained - 1)
        if part.drafts:
            sequence.planned = sequence.computed
            self.counters.drafted += part.drafts
            self.counters.accepted += len(row.token_ids) - 1
        self.blocks.register(sequence.table, sequence.chain, sequence.computed)
        self.blocks.forget(sequence.table, sequence.computed)
        if sequence.prefill_only:
            self._progress(sequence)
        elif gained:
            self._output(sequence, gained, row.scores[:gained])

    def _output(self, sequence: Sequence, gained: int, scores: tuple[Scores, ...]) -> None:
        self.counters.generated += gained
        finish = sequence.finish()
        self._reports.outputs.append(
            TokenOutput(
                sequence=sequence.id,
                token_ids=tuple(sequence.tokens[-gained:]),
                finish=finish,
                computed_tokens=None if sequence.reported else sequence.computed_prompt,
                scores=scores,
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
