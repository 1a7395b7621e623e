"""Steps for a pipeline: of different sequences, as many as there are stages, all of one size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from core.engine.cost import StepCost
from core.engine.guessing import Guessing
from core.engine.plan import SequenceId
from tests.core.engine.harness import spec
from tests.core.engine.stepping import answer, scheduler, shape, step

NAMES = [SequenceId(str(n)) for n in range(5)]


@pytest.mark.parametrize("stages", [2, 3])
def test_decoding_sequences_are_shared_out_over_the_steps(stages: int) -> None:
    of = scheduler(stages=stages)
    for name in NAMES:
        of.run(name, spec(range(4), max_tokens=50))
    while any(one.remaining > 1 for one in of.roster.running) or of.roster.waiting:
        step(of)
    plans = [of.plan() for _ in range(stages)]
    assert of.plan() is None, "all sequences are under way"
    rows = [row for plan in plans if plan is not None for row in plan.rows]
    assert sorted(row.sequence for row in rows) == NAMES
    assert not any(row.follows for row in rows)
    sizes = [len(plan.rows) for plan in plans if plan is not None]
    assert max(sizes) - min(sizes) <= 1
    first = plans[0]
    assert first is not None
    of.apply(answer(first))
    again = of.plan()
    assert again is not None
    assert {row.sequence for row in again.rows} == {row.sequence for row in first.rows}


def test_one_sequence_has_one_step_under_way() -> None:
    of = scheduler(stages=2)
    of.run(NAMES[0], spec(range(4), max_tokens=50))
    first = of.plan()
    assert first is not None
    assert of.plan() is None
    of.apply(answer(first))
    assert of.plan() is not None


def test_the_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    of = scheduler(stages=2, step_tokens=256)
    of.run(NAMES[0], spec(range(200), max_tokens=5))
    plans = [of.plan(), of.plan()]
    assert [shape(plan)[0][1:] for plan in plans if plan] == [(0, 112, False), (112, 200, True)]


def test_short_prompts_are_not_cut() -> None:
    of = scheduler(stages=2, step_tokens=256)
    of.run(NAMES[0], spec(range(60), max_tokens=5))
    plan = of.plan()
    assert plan is not None
    assert shape(plan) == [(NAMES[0], 0, 60, True)]


def test_one_stage_plans_as_before() -> None:
    of = scheduler(step_tokens=256)
    of.run(NAMES[0], spec(range(200), max_tokens=5))
    first, second = of.plan(), of.plan()
    assert first is not None
    assert second is not None
    assert shape(first) == [(NAMES[0], 0, 200, True)]
    assert second.rows[0].follows


class Sure:
    """A drafter that is always right."""

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        return (5,) * most


def test_guesses_of_one_step_do_not_keep_others_from_the_pipeline() -> None:
    """Four that are read already, two stages: two steps of two with guesses, at the same time."""
    cost = StepCost(1e6, 100.0)  # more tokens in a step cost nothing
    guessing = Guessing(Sure, cost, budget=256, stages=2)
    of = scheduler(stages=2, step_tokens=256, guessing=guessing)
    for name in NAMES[:4]:
        of.run(name, spec(range(4), max_tokens=50))
    step(of)
    plans = [of.plan(), of.plan()]
    rows = [row for plan in plans if plan is not None for row in plan.rows]
    assert sorted(row.sequence for row in rows) == NAMES[:4]
    assert [len(plan.rows) for plan in plans if plan] == [2, 2]
    assert all(row.drafts for row in rows)
    assert of.plan() is None
    for plan in plans:
        assert plan is not None
        of.apply(answer(plan, 5, True))
    of.roster.check_integrity()
    assert of.counters.accepted == of.counters.drafted == sum(row.drafts for row in rows)
