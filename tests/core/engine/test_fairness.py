"""Who is served when there is not enough for all: deadlines, priorities, long beside short."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.engine.cost import StepCost
from core.engine.intake import Limits
from core.engine.messages import SequenceFailed
from core.engine.plan import SequenceId
from core.engine.scheduler import Scheduler
from core.kv.block_manager import BlockManager
from tests.core.engine.harness import spec
from tests.core.engine.stepping import A, B, C, D, answer, reserve, scheduler, shape, step


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timed(
    clock: Clock, *, blocks: int = 32, cost: StepCost | None = None, mixed_step_s: float = 0.0
) -> Scheduler:
    limits = Limits(
        context=2000, vocab_size=5000, max_sequences=8, max_step_tokens=512,
        mixed_step_s=mixed_step_s,
    )  # fmt: skip
    return Scheduler(limits, BlockManager([blocks]), b"model", clock=clock, cost=cost)


# ------------------------------------------------------------------ deadlines


def failures(of: Scheduler) -> list[tuple[str, str]]:
    replies = of.take().replies
    return [(one.sequence, one.code) for one in replies if isinstance(one, SequenceFailed)]


def test_past_its_deadline_a_sequence_ends_wherever_it_stands_and_frees_all() -> None:
    clock = Clock()
    of = timed(clock, blocks=8)
    of.run(A, spec(range(40), deadline_s=1.0))
    of.run(B, spec(range(100, 200), deadline_s=2.0))  # waits for memory
    step(of)
    assert of.expires_in == pytest.approx(1.0)
    of.take()
    clock.now += 1.0
    of.expire()
    assert failures(of) == [(A, "deadline_exceeded")]
    assert of.blocks.used == 0
    clock.now += 1.0
    assert of.plan() is None  # B is late too, and nobody asked before
    assert failures(of) == [(B, "deadline_exceeded")]
    assert of.expires_in is None
    of.roster.check_integrity()


def test_late_while_a_step_computes_its_blocks_wait_for_the_step() -> None:
    clock = Clock()
    of = timed(clock)
    of.run(A, spec(range(40), deadline_s=1.0))
    plan = of.plan()
    assert plan is not None
    clock.now += 5
    of.expire()
    assert failures(of) == [(A, "deadline_exceeded")]
    assert of.blocks.used == 3
    of.apply(answer(plan))
    assert of.blocks.used == 0
    assert not of.take().outputs


def test_what_a_peer_is_writing_or_reading_is_left_to_the_front() -> None:
    clock = Clock()
    of = timed(clock)
    reserve(of, A, spec(range(40), deadline_s=1.0))
    of.prefill(B, spec(range(100, 133), deadline_s=1.0))
    step(of)
    of.take()
    clock.now += 5
    of.expire()
    assert failures(of) == []
    assert of.blocks.used == 5
    of.begin(A, kv_in_place=True)
    of.expire()
    assert failures(of) == [(A, "deadline_exceeded")]


# ------------------------------------------------------------------ priorities


def test_a_higher_priority_takes_memory_from_a_lower_one_and_from_no_equal() -> None:
    of = scheduler(blocks=8)
    of.run(A, spec(range(60), priority=1))
    of.run(B, spec(range(100, 140), priority=1))
    step(of)
    step(of)
    of.run(C, spec(range(200, 240), priority=1))
    assert [row.sequence for row in step(of).rows] == [A, B]  # C waits its turn
    of.run(D, spec(range(300, 340)))
    assert [row.sequence for row in step(of).rows] == [A, D]
    assert [one.id for one in of.roster.waiting] == [B, C]
    assert of.counters.preemptions == 1


def test_a_higher_priority_takes_a_slot() -> None:
    of = scheduler(sequences=1)
    of.run(A, spec(range(20), priority=1))
    step(of)
    of.run(B, spec(range(100, 120), max_tokens=1))
    assert [row.sequence for row in step(of).rows] == [B]
    assert shape(step(of)) == [(A, 16, 21, True)]  # its first block was still there


def test_nobody_gives_way_where_that_would_not_do() -> None:
    of = scheduler(blocks=8)
    of.run(A, spec(range(60)))
    of.run(B, spec(range(100, 130), priority=1))
    step(of)
    step(of)
    of.run(C, spec(range(200, 280)))  # five blocks; B has two
    assert [row.sequence for row in step(of).rows] == [A, B]
    assert of.counters.preemptions == 0


@settings(max_examples=60, deadline=None, database=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 2), st.integers(0, 6)), max_size=25
    ),
    blocks=st.integers(6, 16),
    sequences=st.integers(1, 5),
)
def test_priorities_never_go_round_in_circles(
    arrivals: list[tuple[int, int, int]], blocks: int, sequences: int
) -> None:
    """Everyone ends; the preemptions are bounded by who came with a higher priority; nobody of the
    highest priority loses anything for others."""
    of = scheduler(blocks=blocks, sequences=sequences)
    steps = 0
    for number, (length, priority, pause) in enumerate(arrivals):
        of.run(
            SequenceId(str(number)),
            spec([(number * 7 + n) % 1000 for n in range(length)], priority=priority, max_tokens=9),
        )
        for _ in range(pause):
            plan = of.plan()
            if plan is not None:
                of.apply(answer(plan))
                steps += 1
            of.roster.check_integrity()
    while (plan := of.plan()) is not None:
        of.apply(answer(plan))
        steps += 1
        assert steps < 100 * (len(arrivals) + 1)
    assert not of.roster.running
    assert not of.roster.waiting
    assert of.counters.generated == 9 * len(arrivals)
    assert of.counters.preemptions <= 3 * len(arrivals) ** 2


# ------------------------------------------------------------------ long beside short


def test_a_long_prompt_is_read_in_chunks_that_keep_to_the_time_while_others_decode() -> None:
    cost = StepCost(1000.0, 100.0)
    of = timed(Clock(), blocks=200, cost=cost, mixed_step_s=0.1)
    of.run(A, spec(range(1000)))
    assert step(of).tokens == 512  # alone it may take what it likes
    of.run(B, spec(range(2000, 2010)))
    step(of)
    step(of)
    assert [one.remaining for one in of.roster.running] == [1, 1]
    of.run(C, spec(range(3000, 4000)))
    plan = step(of)
    assert [row.sequence for row in plan.rows] == [A, B, C]
    assert len(plan.rows[2].token_ids) == 80  # 100 ms less what two decodes take


@settings(max_examples=50, deadline=None, database=None)
@given(
    long=st.integers(100, 600),
    shorts=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    step_tokens=st.integers(8, 64),
)
def test_nobody_waits_for_those_who_came_later(
    long: int, shorts: list[int], step_tokens: int
) -> None:
    """However many short ones keep coming, a long prompt is read at the pace of what decodes leave
    it; and whoever decodes gets a token in each step, however long the prompts beside it."""
    of = scheduler(blocks=400, sequences=8, step_tokens=step_tokens, context=1000)
    of.run(A, spec(range(5), max_tokens=800))
    while not of.take().outputs:
        step(of)
    of.run(B, spec([n % 1000 for n in range(long)], max_tokens=2))
    coming = list(shorts)
    left = read = 0
    done = False
    for _ in range(long + 5):
        if coming:
            of.run(SequenceId(f"s{len(coming)}"), spec(range(coming.pop()), max_tokens=3))
        plan = step(of)
        assert plan.rows[0].sequence == A
        outputs = of.take().outputs
        assert A in [output.sequence for output in outputs]
        if B in [output.sequence for output in outputs]:
            done = True
            break
        left += step_tokens - sum(row.decodes for row in plan.rows)
        read += sum(len(row.token_ids) for row in plan.rows if row.sequence == B)
        assert read >= left / 2 - 16  # all of it, but for chunks that end with a block
    assert done
