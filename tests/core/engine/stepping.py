"""A scheduler stepped by hand: no runner, no memory."""

from __future__ import annotations

from core.engine.guessing import Guessing
from core.engine.intake import Limits
from core.engine.messages import Reserved, SequenceFailed, SequenceSpec
from core.engine.plan import RowResult, SequenceId, StepPlan, StepResult
from core.engine.scheduler import Scheduler
from core.kv.block_manager import BlockManager

A, B, C, D = (SequenceId(name) for name in "ABCD")


def scheduler(
    *,
    blocks: int = 32,
    context: int = 512,
    sequences: int = 8,
    step_tokens: int = 64,
    stages: int = 1,
    guessing: Guessing | None = None,
) -> Scheduler:
    limits = Limits(
        context=context,
        vocab_size=1000,
        max_sequences=sequences,
        max_step_tokens=step_tokens,
        stages=stages,
    )
    return Scheduler(limits, BlockManager([blocks]), b"model", guessing=guessing)


def answer(plan: StepPlan, token: int = 5, right: bool = False, /, **errors: str) -> StepResult:
    """`right`: all guesses are."""
    rows = tuple(
        RowResult(row.sequence, error=errors[row.sequence])
        if row.sequence in errors
        else RowResult(
            row.sequence, token_ids=(token,) * (1 + right * row.drafts) if row.sample else ()
        )
        for row in plan.rows
    )
    return StepResult(plan.number, rows, 0.01)


def step(of: Scheduler, token: int = 5, **errors: str) -> StepPlan:
    plan = of.plan()
    assert plan is not None
    of.apply(answer(plan, token, **errors))
    of.roster.check_integrity()
    return plan


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    """(sequence, start, end, samples) of each row."""
    return [
        (row.sequence, row.start, row.start + len(row.token_ids), row.sample is not None)
        for row in plan.rows
    ]


def refused(of: Scheduler) -> tuple[str, str]:
    (reply,) = of.take().replies
    assert isinstance(reply, SequenceFailed)
    return reply.code, reply.message


def reserve(of: Scheduler, name: SequenceId, wanted: SequenceSpec) -> Reserved:
    of.reserve(name, wanted)
    (reply,) = of.take().replies
    assert isinstance(reply, Reserved)
    return reply
