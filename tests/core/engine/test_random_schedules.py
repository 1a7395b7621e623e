"""Whatever the order of arrivals, hand-overs, aborts and preemptions: each text is the solo one."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.engine.harness import Front, Op, play, random_ops, rank_config

_ops = st.lists(st.tuples(*[st.integers(0, 999)] * 6), max_size=40)


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
@given(
    ops=_ops,
    blocks=st.integers(6, 14),
    sequences=st.integers(1, 6),
    step_tokens=st.integers(1, 64),
    depth=st.integers(1, 2),
)
def test_any_schedule_gives_the_solo_texts(
    ops: list[Op], blocks: int, sequences: int, step_tokens: int, depth: int
) -> None:
    config = rank_config(blocks=blocks, sequences=sequences, step_tokens=step_tokens, context=150)
    front = Front(config, depth=depth)
    try:
        play(front, ops)
        assert front.stats.blocks_used == 0
    finally:
        front.close()


@pytest.mark.parametrize("lot", range(4))
def test_thousands_of_schedules_give_the_solo_texts(lot: int) -> None:
    preempted = cached = 0
    for seed in range(lot * 300, (lot + 1) * 300):
        dice = random.Random(seed)
        config = rank_config(
            blocks=dice.choice((4, 6, 9, 12, 40)),
            sequences=dice.randrange(1, 7),
            step_tokens=dice.choice((1, 7, 16, 50, 128)),
            repeat=dice.random() < 0.5,
            context=150,
        )
        front = Front(config, depth=dice.choice((1, 1, 2, 3)))
        try:
            play(front, random_ops(dice, dice.randrange(5, 45)))
            preempted += front.stats.preemptions
            cached += front.stats.cached_prompt_tokens
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            front.close()
    assert preempted > 50
    assert cached > 1000
