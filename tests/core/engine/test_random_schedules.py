"""Whatever the order of arrivals, hand-overs, aborts and preemptions, however many plans are ahead
and whatever is guessed: each text is the solo one."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.engine.harness import Front, rank_config
from tests.core.engine.playing import Op, play, random_ops

_ops = st.lists(st.tuples(*[st.integers(0, 999)] * 6), max_size=40)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
@given(
    ops=_ops,
    blocks=st.integers(6, 14),
    sequences=st.integers(1, 6),
    step_tokens=st.integers(1, 64),
    depth=st.integers(1, 3),
    stages=st.sampled_from((1, 1, 2, 3)),
    guesses=st.booleans(),
    window=st.sampled_from((0, 0, 8, 40)),
)
def test_any_schedule_gives_the_solo_texts(
    ops: list[Op],
    blocks: int,
    sequences: int,
    step_tokens: int,
    depth: int,
    stages: int,
    guesses: bool,
    window: int,
) -> None:
    config = rank_config(
        blocks=blocks, sequences=sequences, step_tokens=step_tokens, context=150, scramble=True,
        window=window, window_blocks=-(-window // 16) + 1 + blocks % 5,
    )  # fmt: skip
    prophet = random.Random(0) if guesses else None
    front = Front(config, depth=depth, stages=stages, prophet=prophet)
    try:
        play(front, ops)
        if stages > 1:
            rows = [row for plan in front.runner.plans for row in plan.rows]
            assert not any(row.follows for row in rows), "no token is at the first stage in time"
        assert front.stats.blocks_used == 0
    finally:
        front.close()


def play_seeds(seeds: range) -> Counter[str]:
    """Play one schedule for each seed: how often the interesting things happened."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        dice = random.Random(seed)
        window = dice.choice((0, 0, 5, 16, 40))
        config = rank_config(
            blocks=dice.choice((4, 6, 9, 12, 40)),
            sequences=dice.randrange(1, 7),
            step_tokens=dice.choice((1, 7, 16, 50, 128)),
            repeat=dice.random() < 0.3,
            scramble=dice.random() < 0.7,
            context=150,
            window=window,
            window_blocks=-(-window // 16) + 1 + dice.choice((0, 1, 3, 20)),
        )
        prophet = random.Random(seed) if dice.random() < 0.5 else None
        front = Front(config, depth=dice.choice((1, 2, 2, 3)), prophet=prophet)
        try:
            play(front, random_ops(dice, dice.randrange(5, 45)))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            front.close()
        stats = front.stats
        seen["preempted"] += stats.preemptions
        seen["cached"] += stats.cached_prompt_tokens
        seen["accepted"] += stats.accepted_tokens
        seen["rejected"] += stats.drafted_tokens - stats.accepted_tokens
        seen["moved"] += len(front.named("moved"))
        seen["late"] += sum(one.code == "deadline_exceeded" for one in front.all.values())
        seen["ahead"] += front.follows
    return seen


_LEAST = {
    "preempted": 30,
    "cached": 300,
    "accepted": 500,
    "rejected": 500,
    "moved": 10,
    "late": 5,
    "ahead": 500,
}
"""So often at least in 300 schedules, or the test has lost its teeth."""


def test_hundreds_of_schedules_give_the_solo_texts() -> None:
    seen = play_seeds(range(300))
    print(dict(seen))
    assert all(seen[what] >= least for what, least in _LEAST.items()), seen


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lot", range(1, 21))
def test_thousands_of_schedules_give_the_solo_texts(lot: int) -> None:
    seen = play_seeds(range(lot * 300, (lot + 1) * 300))
    assert all(seen[what] >= least for what, least in _LEAST.items()), seen
