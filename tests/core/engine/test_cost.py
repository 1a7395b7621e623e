from __future__ import annotations

import pytest

from core.engine.cost import StepCost
from core.engine.plan import Row, SampleSpec, SequenceId, StepPlan

GREEDY = SampleSpec(temperature=0, top_p=1, top_k=0, seed=0, choice=0, position=0)


def plan(*, decode: int = 0, prompt: int = 0, drafts: int = 0) -> StepPlan:
    rows = [
        Row(SequenceId(f"d{n}"), (0,) * (1 + drafts), 9, ((0,),), GREEDY, drafts=drafts)
        for n in range(decode)
    ]
    if prompt:
        rows.append(Row(SequenceId("p"), (0,) * prompt, 0, ((0,),), None))
    return StepPlan(1, tuple(rows))


def test_before_the_first_step_it_goes_by_what_was_measured_at_load() -> None:
    cost = StepCost(1000.0, 50.0)
    assert cost.decode_s(1) == pytest.approx(0.02)
    assert cost.decode_s(5) == pytest.approx(0.024)
    assert cost.step_s(1, 100) == pytest.approx(0.12)
    assert cost.decode_s(0) == 0


def test_each_size_has_its_own_time_and_drafts_are_tokens() -> None:
    cost = StepCost(1000.0, 50.0)
    for _ in range(40):
        cost.note(plan(decode=1), 0.010)
        cost.note(plan(decode=2, drafts=3), 0.030)
    assert cost.decode_s(1) == pytest.approx(0.010)
    assert cost.decode_s(8) == pytest.approx(0.030)
    assert cost.decode_s(4) == pytest.approx(0.013)  # from the size below, as if it were prompt
    cost.note(plan(decode=4), 0.025)
    assert cost.decode_s(4) == pytest.approx(0.025)  # and then as it is


def test_one_slow_step_does_not_count_for_what_it_took() -> None:
    cost = StepCost(1000.0, 50.0)
    for _ in range(20):
        cost.note(plan(decode=1), 0.010)
    cost.note(plan(decode=1), 5.0)
    assert cost.decode_s(1) < 0.011


@pytest.mark.parametrize("start", [100.0, 1000.0, 30_000.0])
def test_mixed_steps_give_the_rate_of_prefill_and_not_that_of_the_mixture(start: float) -> None:
    """8 decodes that take 20 ms, and 100 prompt tokens at 2,000 a second beside them."""
    cost = StepCost(start, 50.0)
    for _ in range(20):
        cost.note(plan(decode=8), 0.020)
    for _ in range(600):
        cost.note(plan(decode=8, prompt=100), 0.020 + 0.050)
    assert cost.prefill_tokens_per_s == pytest.approx(2000, rel=0.02)
    assert cost.decode_s(8) == pytest.approx(0.020)


def test_plain_prefill_comes_to_what_it_delivers_and_short_rests_say_nothing() -> None:
    cost = StepCost(1000.0, 50.0)
    for _ in range(100):
        cost.note(plan(prompt=512), 0.25)
    assert cost.prefill_tokens_per_s == pytest.approx(2048, rel=0.01)
    for _ in range(100):
        cost.note(plan(decode=1, prompt=5), 0.02)
        cost.note(plan(), 0.0)
    assert cost.prefill_tokens_per_s == pytest.approx(2048, rel=0.01)


def test_a_chunk_keeps_to_the_time_and_is_never_nothing() -> None:
    cost = StepCost(1000.0, 50.0)
    assert cost.prompt_tokens_within(0.25, 1) == 224  # 230 ms left, in whole blocks
    assert cost.prompt_tokens_within(0.01, 1) == 16
    for _ in range(20):
        cost.note(plan(decode=32), 0.3)
    assert cost.prompt_tokens_within(0.25, 32) == 288  # as long as the decodes
