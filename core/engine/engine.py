"""The loop body of a rank: commands → scheduler → runner → messages. No sockets, no clock."""

from __future__ import annotations

from collections import deque

from core.engine.messages import (
    Abort,
    Begin,
    Command,
    EngineStats,
    Prefill,
    Release,
    Reserve,
    Reserved,
    Run,
    SequenceFailed,
    Shutdown,
    Stepped,
)
from core.engine.plan import LoadedModel, Runner, StepHandle, StepPlan, StepResult
from core.engine.scheduler import Limits, Scheduler
from core.kv.block_manager import BlockManager
from core.types import BLOCK_TOKENS

_PREFILL_MEMORY_TOKENS = 4096
_DECODE_MEMORY_STEPS = 32
_SHORTEST_STEP_S = 1e-6


class Rates:
    """Moving averages of what steps delivered, seeded with what was measured at load.

    A row of more than one token is prefill, a row of one token is decode. Decode is per sequence:
    one token a step. Prefill is all prompt tokens of a step over its whole time, so decodes that
    share the step make it slower, as they do for the caller. Rests of a prompt below one block say
    nothing about the rate and are left out.
    """

    def __init__(self, prefill_tokens_per_s: float, decode_tokens_per_s: float) -> None:
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.decode_tokens_per_s = decode_tokens_per_s

    def note(self, plan: StepPlan, result: StepResult) -> None:
        seconds = max(result.seconds, _SHORTEST_STEP_S)
        prompt = sum(len(row.token_ids) for row in plan.rows if len(row.token_ids) > 1)
        if prompt >= BLOCK_TOKENS:
            share = min(1.0, prompt / _PREFILL_MEMORY_TOKENS)
            self.prefill_tokens_per_s += share * (prompt / seconds - self.prefill_tokens_per_s)
        if any(len(row.token_ids) == 1 for row in plan.rows):
            share = 1 / _DECODE_MEMORY_STEPS
            self.decode_tokens_per_s += share * (1 / seconds - self.decode_tokens_per_s)


class Engine:
    """`depth` plans may be with the runner at once. Not started before the runner has loaded."""

    def __init__(
        self,
        loaded: LoadedModel,
        runner: Runner,
        *,
        max_sequences: int,
        max_step_tokens: int,
        depth: int = 1,
    ) -> None:
        limits = Limits(
            context=loaded.context,
            vocab_size=loaded.vocab_size,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
        )
        self.scheduler = Scheduler(limits, BlockManager(loaded.geometry.blocks), loaded.fingerprint)
        self.stopping = False
        self._runner = runner
        self._depth = depth
        self._handles: deque[tuple[StepPlan, StepHandle]] = deque()
        self._rates = Rates(loaded.prefill_tokens_per_s, loaded.decode_tokens_per_s)
        self._reported = self.stats()

    def handle(self, command: Command) -> None:
        """Take one command. Raises InternalError when it makes no sense in this state."""
        match command:
            case Run(sequence, spec):
                self.scheduler.run(sequence, spec)
            case Reserve(sequence, spec):
                self.scheduler.reserve(sequence, spec)
            case Begin(sequence, kv_in_place):
                self.scheduler.begin(sequence, kv_in_place=kv_in_place)
            case Prefill(sequence, spec):
                self.scheduler.prefill(sequence, spec)
            case Release(sequence):
                self.scheduler.release(sequence)
            case Abort(sequence):
                self.scheduler.abort(sequence)
            case Shutdown():
                self.stopping = True

    def step(self) -> bool:
        """Compute one step to its end; False when there was nothing to compute."""
        while len(self._handles) < self._depth:
            plan = self.scheduler.plan()
            if plan is None:
                break
            self._handles.append((plan, self._runner.submit(plan)))
        if not self._handles:
            return False
        plan, handle = self._handles.popleft()
        result = handle.result()
        self.scheduler.apply(result)
        self._rates.note(plan, result)
        return True

    def messages(self) -> list[Reserved | SequenceFailed | Stepped]:
        """What is to be told since the last call: replies, then at most one Stepped."""
        reports = self.scheduler.take()
        changes = self.scheduler.blocks.take_changes()
        stats = self.stats()
        told: list[Reserved | SequenceFailed | Stepped] = [*reports.replies]
        news = reports.outputs or reports.progress or changes.stored or changes.evicted
        if news or stats != self._reported:
            self._reported = stats
            told.append(
                Stepped(
                    outputs=tuple(reports.outputs),
                    progress=tuple(reports.progress),
                    stored=changes.stored,
                    evicted=changes.evicted,
                    stats=stats,
                )
            )
        return told

    def stats(self) -> EngineStats:
        gauges, counters = self.scheduler.roster.gauges(), self.scheduler.counters
        blocks = self.scheduler.blocks
        return EngineStats(
            running=gauges.running,
            waiting=gauges.waiting,
            blocks_used=blocks.used,
            blocks_cached=blocks.cache.idle,
            blocks_total=blocks.totals[0],
            prefill_backlog_tokens=gauges.prefill_backlog_tokens,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_tokens_per_s=self._rates.decode_tokens_per_s,
            generated_tokens=counters.generated,
            computed_prompt_tokens=counters.computed_prompt,
            cached_prompt_tokens=counters.cached_prompt,
            preemptions=counters.preemptions,
        )
