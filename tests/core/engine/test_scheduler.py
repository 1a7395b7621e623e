from __future__ import annotations

import math

import msgspec
import pytest

from core.engine.messages import SequenceFailed, SequenceSpec, TokenOutput
from core.engine.plan import RowResult, StepResult
from core.engine.scheduler import Scheduler
from core.errors import InternalError
from core.types import FinishReason
from tests.core.engine.harness import spec
from tests.core.engine.stepping import A, B, C, D, answer, refused, scheduler, shape, step
from tests.core.engine.watched import END

# ------------------------------------------------------------------ a step


def test_a_prompt_is_read_in_chunks_and_the_last_one_samples() -> None:
    of = scheduler(step_tokens=20)
    of.run(A, spec(range(50)))
    assert shape(step(of)) == [(A, 0, 16, False)]  # to a block's end: 20 would split one
    assert shape(step(of)) == [(A, 16, 32, False)]
    assert shape(step(of)) == [(A, 32, 50, True)]
    assert shape(step(of)) == [(A, 50, 51, True)]


def test_decodes_come_before_chunks_and_chunks_before_newcomers() -> None:
    of = scheduler(step_tokens=20)
    of.run(A, spec(range(10)))
    step(of)
    of.run(B, spec(range(100, 140)))
    assert shape(step(of)) == [(A, 10, 11, True), (B, 0, 16, False)]
    of.run(C, spec(range(200, 205)))
    assert shape(step(of)) == [(A, 11, 12, True), (B, 16, 32, False), (C, 0, 3, False)]
    assert shape(step(of)) == [
        (A, 12, 13, True), (B, 32, 40, True), (C, 3, 5, True),
    ]  # fmt: skip


def test_the_queue_is_served_by_priority_then_arrival() -> None:
    of = scheduler(sequences=1)
    of.run(A, spec(range(4), priority=1, max_tokens=1))
    of.run(B, spec(range(4), priority=0, max_tokens=1))
    of.run(C, spec(range(4), priority=0, max_tokens=1))
    assert [step(of).rows[0].sequence for _ in range(3)] == [B, C, A]
    assert of.plan() is None


def test_nobody_behind_a_head_that_lacks_memory_is_admitted() -> None:
    of = scheduler(blocks=8)
    of.run(A, spec(range(64)))
    step(of)
    of.run(B, spec(range(100, 164)))  # 4 blocks; 4 are left, one of them for growth
    of.run(C, spec(range(200, 204)))
    assert [row.sequence for row in step(of).rows] == [A]
    of.abort(A)
    assert [row.sequence for row in step(of).rows] == [B]
    assert [row.sequence for row in step(of).rows] == [B, C]


def test_sampling_is_told_seed_and_position_not_place() -> None:
    of = scheduler()
    of.run(A, msgspec.structs.replace(spec(range(5), outputs=(7, 8)), seed=9, choice=2))
    (row,) = step(of).rows
    assert row.token_ids == (0, 1, 2, 3, 4, 7, 8)
    assert row.sample is not None
    assert (row.sample.seed, row.sample.choice, row.sample.position) == (9, 2, 2)
    (row,) = step(of).rows
    assert row.sample is not None
    assert row.sample.position == 3


def test_more_sequences_than_budget_all_decode() -> None:
    of = scheduler(sequences=8, step_tokens=2)
    for name in (A, B, C):
        of.run(name, spec(range(3), max_tokens=6))
    outputs = 0
    while of.roster.running or of.roster.waiting:
        assert step(of).tokens <= 2
        outputs += len(of.take().outputs)
    assert outputs == 18


# ------------------------------------------------------------------ the end of a sequence


def finishes(of: Scheduler) -> list[TokenOutput]:
    return [output for output in of.take().outputs if output.finish is not None]


def test_a_stop_id_ends_with_stop_and_is_in_the_output() -> None:
    of = scheduler()
    of.run(A, spec(range(5), stop=frozenset({6})))
    step(of, 5)
    step(of, 6)
    (output,) = finishes(of)
    assert (output.token_ids, output.finish) == ((6,), FinishReason.STOP)
    assert of.blocks.used == 0
    assert of.plan() is None


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_max_tokens_ends_with_length(max_tokens: int) -> None:
    of = scheduler()
    of.run(A, spec(range(5), max_tokens=max_tokens))
    for _ in range(max_tokens):
        assert not finishes(of)
        step(of)
    assert finishes(of)[0].finish is FinishReason.LENGTH


def test_a_stop_id_as_the_last_allowed_token_is_a_stop() -> None:
    of = scheduler()
    of.run(A, spec(range(5), max_tokens=1, stop=frozenset({6})))
    step(of, 6)
    assert finishes(of)[0].finish is FinishReason.STOP


def test_the_context_ends_with_length() -> None:  # B12
    of = scheduler(context=40)
    of.run(A, spec(range(39)))
    step(of)
    (output,) = finishes(of)
    assert (output.token_ids, output.finish) == ((5,), FinishReason.LENGTH)
    of.run(B, spec(range(40)))
    assert refused(of)[0] == "context_length_exceeded"


def test_the_pool_bounds_the_context() -> None:
    of = scheduler(blocks=2, context=512)
    assert of.context == 32
    of.run(A, spec(range(31)))
    step(of)
    assert finishes(of)[0].finish is FinishReason.LENGTH
    of.run(B, spec(range(32)))
    assert refused(of) == (
        "no_capacity", "the prompt has 32 tokens and this node's KV cache holds 32",
    )  # fmt: skip


def test_a_continued_request_counts_what_was_generated_before() -> None:
    of = scheduler()
    of.run(A, spec(range(5), outputs=(7, 8), max_tokens=3))
    step(of)
    (output,) = finishes(of)
    assert (output.token_ids, output.computed_tokens) == ((5,), 5)
    of.run(B, spec(range(5), outputs=(7, 8, 9), max_tokens=3))
    of.run(C, spec(range(5), outputs=(7, END), max_tokens=30))
    assert [(o.sequence, o.token_ids, o.finish) for o in of.take().outputs] == [
        (B, (), FinishReason.LENGTH), (C, (), FinishReason.STOP),
    ]  # fmt: skip
    of.reserve(D, spec(range(5), outputs=(7, 8, 9), max_tokens=3))
    assert refused(of)[0] == "invalid_request"


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        (spec([]), "no tokens"),
        (spec([3, -1]), "token id -1 is outside the vocabulary of 1000"),
        (spec([3, 1000]), "token id 1000 is outside"),
        (spec([2**40]), "outside the vocabulary"),
        (spec([3], outputs=(1000,)), "token id 1000 is outside"),
        (spec([3], max_tokens=0), "max_tokens"),
        (msgspec.structs.replace(spec([3]), temperature=math.nan), "temperature"),
        (msgspec.structs.replace(spec([3]), temperature=-1.0), "temperature"),
        (msgspec.structs.replace(spec([3]), top_p=math.nan), "top_p"),
        (msgspec.structs.replace(spec([3]), top_k=-1), "top_k"),
        (msgspec.structs.replace(spec([3]), min_p=1.5), "min_p"),
        (msgspec.structs.replace(spec([3]), repetition_penalty=0.0), "repetition_penalty"),
        (msgspec.structs.replace(spec([3]), presence_penalty=math.inf), "presence_penalty"),
        (msgspec.structs.replace(spec([3]), logprobs=-1), "logprobs"),
        (msgspec.structs.replace(spec([3]), deadline_s=math.nan), "deadline_s"),
        (msgspec.structs.replace(spec([3]), logit_bias=((1000, 1.0),)), "token 1000"),
        (msgspec.structs.replace(spec([3]), logit_bias=((3, math.nan),)), "bias of nan"),
    ],
)
@pytest.mark.parametrize("kind", ["run", "reserve", "prefill"])
def test_what_cannot_be_served_is_refused_and_harms_nobody(  # B10
    wanted: SequenceSpec, complaint: str, kind: str
) -> None:
    of = scheduler()
    of.run(A, spec(range(5)))
    getattr(of, kind)(B, wanted)
    code, message = refused(of)
    assert code == "invalid_request"
    assert complaint in message
    assert [row.sequence for row in step(of).rows] == [A]


def test_ids_that_nobody_knows_are_forgotten_again_without_a_word() -> None:
    of = scheduler()
    of.abort(A)
    of.release(A)
    reports = of.take()
    assert [*reports.replies, *reports.outputs, *reports.progress] == []
    of.begin(A, kv_in_place=True)
    assert refused(of)[0] == "internal_error"


def test_commands_that_make_no_sense_are_not_passed_over() -> None:
    of = scheduler()
    of.run(A, spec(range(5)))
    with pytest.raises(InternalError, match="in use already"):
        of.run(A, spec(range(5)))
    with pytest.raises(InternalError, match="begin of A, which is waiting"):
        of.begin(A, kv_in_place=True)
    with pytest.raises(InternalError, match="nobody reads"):
        of.release(A)
    with pytest.raises(InternalError, match="step 7"):
        of.apply(StepResult(7, (), 0.0))


# ------------------------------------------------------------------ errors of a row


def test_a_bad_row_ends_its_sequence_and_no_other() -> None:
    of = scheduler()
    of.run(A, spec(range(5)))
    of.run(B, spec(range(100, 140)))
    step(of, B="the logits are not numbers")
    reports = of.take()
    assert reports.replies == [SequenceFailed(B, "internal_error", "the logits are not numbers")]
    assert [output.sequence for output in reports.outputs] == [A]
    assert [row.sequence for row in step(of).rows] == [A]


def test_what_a_bad_row_read_is_offered_to_nobody() -> None:
    of = scheduler()
    of.run(A, spec(range(40), max_tokens=1))
    step(of)
    of.run(B, spec(range(40)))
    assert shape(step(of, B="not what was computed")) == [(B, 32, 40, True)]
    of.run(C, spec(range(40)))
    assert shape(step(of)) == [(C, 0, 40, True)]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (RowResult(A), "no token"),
        (RowResult(A, token_ids=(1000,)), "outside the vocabulary"),
        (RowResult(A, token_ids=(-1,)), "outside the vocabulary"),
        (RowResult(B, token_ids=(1,)), "no result"),
    ],
)
def test_a_result_that_cannot_be_ends_the_sequence(row: RowResult, complaint: str) -> None:
    of = scheduler()
    of.run(A, spec(range(5)))
    plan = of.plan()
    assert plan is not None
    of.apply(StepResult(plan.number, (row,), 0.0))
    code, message = refused(of)
    assert code == "internal_error"
    assert complaint in message
    assert of.blocks.used == 0


# ------------------------------------------------------------------ plans in flight


def test_blocks_of_a_step_in_flight_are_free_after_its_result() -> None:
    of = scheduler(blocks=4)
    of.run(A, spec(range(40)))
    plan = of.plan()
    assert plan is not None
    of.abort(A)
    assert of.blocks.used == 3
    of.roster.check_integrity()
    of.reserve(B, spec(range(100, 140)))
    assert refused(of)[0] == "no_capacity"
    of.apply(answer(plan))
    assert of.blocks.used == 0
    assert not of.take().outputs
    of.roster.check_integrity()


def test_chunks_and_tokens_may_follow_each_other_without_a_result() -> None:
    of = scheduler(step_tokens=16)
    of.run(A, spec(range(40), max_tokens=3))
    plans = [of.plan() for _ in range(6)]
    assert [plan and shape(plan) for plan in plans] == [
        [(A, 0, 16, False)], [(A, 16, 32, False)], [(A, 32, 40, True)],
        [(A, 40, 41, True)], [(A, 41, 42, True)], None,
    ]  # fmt: skip
    rows = [plan.rows[0] for plan in plans if plan is not None]
    assert [row.follows for row in rows] == [False, False, False, True, True]
    assert [row.sample.position for row in rows if row.sample is not None] == [0, 1, 2]
    for token, plan in enumerate(plans[:5]):
        assert plan is not None
        of.apply(answer(plan, token))
    assert [output.token_ids for output in of.take().outputs] == [(2,), (3,), (4,)]
    assert of.blocks.used == 0
    of.roster.check_integrity()


def test_an_end_that_is_seen_a_step_late_leaves_no_trace() -> None:
    of = scheduler(blocks=4)
    of.run(A, spec(range(47), stop=frozenset({9})))
    step(of)
    first, second = of.plan(), of.plan()
    assert first is not None
    assert second is not None
    assert second.rows[0].follows
    of.take()
    of.apply(answer(first, 9))
    (output,) = of.take().outputs
    assert (output.token_ids, output.finish) == ((9,), FinishReason.STOP)
    assert of.blocks.used == 4  # the step after it has them still
    assert of.counters.generated == 2
    of.roster.check_integrity()
    assert of.plan() is None
    of.apply(answer(second, 7))
    assert not of.take().outputs
    assert (of.blocks.used, of.counters.generated) == (0, 2)
    of.run(B, spec([*range(47), 5, 9, 7, 8]))
    assert shape(step(of)) == [(B, 48, 51, True)]  # nothing of the discarded token was kept


def test_nobody_loses_blocks_to_a_plan_that_is_ahead() -> None:
    of = scheduler(blocks=5)
    of.run(A, spec(range(31)))
    of.run(B, spec(range(100, 131)))
    step(of)
    plans = [of.plan()]  # both now fill their second block
    assert of.plan() is None  # two blocks are wanted and one is free: better wait
    assert of.counters.preemptions == 0
    assert plans[0] is not None
    of.apply(answer(plans[0]))
    assert [row.sequence for row in step(of).rows] == [A]


def test_an_id_may_come_back_while_its_last_life_is_in_flight() -> None:
    of = scheduler()
    of.run(A, spec(range(40)))
    plan = of.plan()
    assert plan is not None
    of.abort(A)
    of.run(A, spec(range(500, 510)))
    of.apply(answer(plan))
    assert not of.take().outputs
    assert shape(step(of)) == [(A, 0, 10, True)]
