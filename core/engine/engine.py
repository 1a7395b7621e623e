"""The loop body of a rank: commands → scheduler → runner → messages. No sockets, no clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from core.engine.cost import SHORTEST_STEP_S, StepCost
from core.engine.drafter import Drafter
from core.engine.guessing import Guessing
from core.engine.intake import Limits
from core.engine.lending_messages import Adopt, Hold, Import
from core.engine.messages import (
    Abort,
    Begin,
    Command,
    EngineStats,
    Prefill,
    Release,
    Reply,
    Reserve,
    Run,
    Shutdown,
    Stepped,
)
from core.engine.plan import (
    LoadedModel,
    Mirrors,
    Runner,
    SequenceId,
    StepHandle,
    StepPlan,
    StepResult,
)
from core.engine.purge_messages import Purge, Scrubbed
from core.engine.purging import Purging
from core.engine.scheduler import Scheduler
from core.kv.block_manager import BlockManager

_DECODE_MEMORY_STEPS = 32


class DecodeRate:
    """Tokens a second that a sequence gets while it decodes: a moving average over steps."""

    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s

    def note(self, plan: StepPlan, result: StepResult) -> None:
        decoding = {row.sequence for row in plan.rows if row.decodes}
        gained = sum(len(row.token_ids) for row in result.rows if row.sequence in decoding)
        if decoding:
            rate = gained / len(decoding) / max(result.seconds, SHORTEST_STEP_S)
            self.tokens_per_s += (rate - self.tokens_per_s) / _DECODE_MEMORY_STEPS


class Engine:
    """`depth` plans may be with the runner at once, in a pipeline one for each of its `stages`. Not
    started before the runner has loaded.

    `landed` is called, from any thread, whenever a step has been computed: once for each, in order.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        runner: Runner,
        *,
        max_sequences: int,
        max_step_tokens: int,
        depth: int = 1,
        mixed_step_s: float = 0.0,
        stages: int = 1,
        drafter: Callable[[], Drafter] | None = None,
        landed: Callable[[object], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = Limits(
            context=loaded.context,
            vocab_size=loaded.vocab_size,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            mixed_step_s=mixed_step_s,
            stages=stages,
        )
        geometry = loaded.geometry
        # Prefixes are known by the blocks of group 0, which keeps them all whatever its layers see.
        windows = [None, *(group.window for group in geometry.groups[1:])]
        self._cost = StepCost(loaded.prefill_tokens_per_s, loaded.decode_tokens_per_s)
        self._decode_rate = DecodeRate(loaded.decode_tokens_per_s)
        self.scheduler = Scheduler(
            limits,
            BlockManager(geometry.blocks, windows),
            loaded.fingerprint,
            cost=self._cost,
            guessing=drafter
            and Guessing(drafter, self._cost, budget=max_step_tokens, stages=stages),
            clock=clock,
        )
        self.stopping = False
        self._purging = Purging(self.scheduler.blocks, loaded.fingerprint)
        self._runner = runner
        self._depth = max(depth, stages)
        self._handles: deque[tuple[StepPlan, StepHandle]] = deque()
        self._clock = clock
        self._stepping_since = 0.0
        self._landed = landed
        self._reported = self.stats()

    def handle(self, command: Command) -> None:
        """Take one command. Raises InternalError when it makes no sense in this state."""
        match command:
            case Run(sequence, spec):
                self.scheduler.run(sequence, spec)
            case Reserve(sequence, spec):
                self.scheduler.reserve(sequence, spec)
            case Begin(sequence, kv_in_place):
                if kv_in_place:
                    self._arrived(sequence)
                self.scheduler.begin(sequence, kv_in_place=kv_in_place)
            case Prefill(sequence, spec):
                self.scheduler.prefill(sequence, spec)
            case Release(sequence):
                self.scheduler.release(sequence)
            case Import(sequence=sequence):
                self.scheduler.bring(
                    sequence, command.token_ids, command.namespace, priority=command.priority
                )
            case Adopt(sequence, tokens):
                self._arrived(sequence)
                self.scheduler.adopt(sequence, tokens)
            case Hold(sequence=sequence):
                self.scheduler.hold(sequence, command.token_ids, command.namespace)
            case Abort(sequence):
                self.scheduler.abort(sequence)
            case Purge(namespace):
                self._purging.begin(namespace)
            case Scrubbed(namespace):
                if isinstance(self._runner, Mirrors):
                    self._runner.arrive(self._purging.blocks(namespace))
                self._purging.scrubbed(namespace)
            case Shutdown():
                self.stopping = True

    def _arrived(self, sequence: SequenceId) -> None:
        """Blocks that were set aside have been filled in the shared memory."""
        if isinstance(self._runner, Mirrors):
            filled = self.scheduler.roster.set_aside(sequence)
            self._runner.arrive([tuple(group.values()) for group in filled])

    @property
    def busy(self) -> bool:
        """Is a step being computed?"""
        return bool(self._handles)

    @property
    def stepping_s(self) -> float:
        """How long the oldest step has been computed by now; 0 without one."""
        return self._clock() - self._stepping_since if self._handles else 0.0

    def fill(self) -> None:
        """Give the runner as many steps as there are and it may have."""
        while len(self._handles) < self._depth:
            plan = self.scheduler.plan()
            if plan is None:
                break
            if not self._handles:
                self._stepping_since = self._clock()
            handle = self._runner.submit(plan)
            self._handles.append((plan, handle))
            if self._landed is not None:
                handle.add_done_callback(self._landed)

    def collect(self) -> None:
        """Wait for the oldest step and take its result."""
        plan, handle = self._handles.popleft()
        result = handle.result()
        self._stepping_since = self._clock()
        self.scheduler.apply(result)
        self._cost.note(plan, result.seconds)
        self._decode_rate.note(plan, result)

    def step(self) -> bool:
        """Compute one step to its end; False when there was nothing to compute."""
        self.fill()
        if not self._handles:
            return False
        self.collect()
        return True

    def messages(self) -> list[Reply | Stepped]:
        """What is to be told since the last call: replies, then at most one Stepped."""
        reports = self.scheduler.take()
        changes = self.scheduler.blocks.take_changes()
        stats = self.stats()
        told: list[Reply | Stepped] = [*reports.replies, *self._purging.settled()]
        told_of = reports.outputs or reports.given_back or reports.progress
        news = told_of or changes.stored or changes.evicted
        if news or stats != self._reported:
            self._reported = stats
            told.append(
                Stepped(
                    outputs=tuple(reports.outputs),
                    given_back=tuple(reports.given_back),
                    progress=tuple(reports.progress),
                    stored=changes.stored,
                    evicted=changes.evicted,
                    stats=stats,
                )
            )
        return told

    def stats(self) -> EngineStats:
        gauges, counters = self.scheduler.roster.gauges(), self.scheduler.counters
        blocks, work = self.scheduler.blocks, self._runner.work()
        return EngineStats(
            running=gauges.running,
            waiting=gauges.waiting,
            blocks_used=blocks.used,
            blocks_cached=blocks.cache.idle,
            blocks_total=blocks.totals[0],
            prefill_backlog_tokens=gauges.prefill_backlog_tokens,
            prefill_tokens_per_s=self._cost.prefill_tokens_per_s,
            decode_tokens_per_s=self._decode_rate.tokens_per_s,
            generated_tokens=counters.generated,
            computed_prompt_tokens=counters.computed_prompt,
            cached_prompt_tokens=counters.cached_prompt,
            preemptions=counters.preemptions,
            drafted_tokens=counters.drafted,
            accepted_tokens=counters.accepted,
            sent_bytes=work.sent_bytes,
            least_bytes=work.least_bytes,
            stage_seconds=work.stage_seconds,
            pipeline_bubble=work.bubble,
        )
