"""The waterfall of a request: every second is in one step, and the longest is named."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from core.story import Choice, Step, StepName, Story, Try, Wait, waterfall, worst
from core.types import NodeName, RegionName, RequestId, Timings

EU, US = RegionName("eu"), RegionName("us")
CHOICE = Choice(
    at_s=0.002, reason="prefix_home", order=(EU, US), weighed=(), bound_s=10.0, key_depth=2,
    key_blocks=7, text_bytes=3584, hot_version="0", by_affinity=False,
)  # fmt: skip
WON = Try(
    region=US, reason="failover", began_s=0.1, accepted_s=0.3, first_s=0.8, ended_s=1.9,
    outcome="ok", prefill=NodeName("us-p"), decode=NodeName("us-d"),
)  # fmt: skip
STORY = Story(
    id=RequestId("r1"), edge="ams", worker=1, dialect="chat", at=0.0, age_s=9.0, outcome="ok",
    admitted_s=0.001, choices=(CHOICE,),
    tries=(Try(region=EU, reason="prefix_home", began_s=0.002, ended_s=0.1, outcome="node_lost"),
           WON),
    ended_s=1.9,
    timings=Timings(queue_s=0.05, prefill_s=0.4, decode_s=1.0, transfer_s=0.2, kv_bytes=3_000_000),
)  # fmt: skip


def _named(steps: tuple[Step, ...]) -> list[tuple[str, float]]:
    return [(step.name, round(step.seconds, 6)) for step in steps]


def test_all_the_time_is_in_steps_one_after_the_other() -> None:
    steps = waterfall(STORY)
    assert _named(steps) == [
        ("admit", 0.001),
        ("route", 0.001),
        ("failed attempt", 0.098),
        ("travel", 0.15),
        ("queue", 0.05),
        ("prefill", 0.5),
        ("transfer", 0.2),
        ("decode", 1.0),
        ("relay", 0.1),
    ]
    row = [step for step in steps if step.name is not StepName.TRANSFER]
    for before, after in pairwise(row):
        assert after.start_s == pytest.approx(before.start_s + before.seconds)
    assert sum(step.seconds for step in row) == pytest.approx(1.9)
    assert next(step.note for step in steps if step.name is StepName.FAILED) == "eu: node_lost"


def test_the_worst_step_is_the_longest_and_a_transfer_only_if_it_is_most_of_the_reading() -> None:
    found = worst(waterfall(STORY))
    assert found is not None
    assert found.name is StepName.DECODE
    for transfer_s, name in ((0.2, StepName.PREFILL), (0.4, StepName.TRANSFER)):
        timings = Timings(queue_s=0.05, decode_s=0.1, transfer_s=transfer_s)
        short = replace(STORY, timings=timings, ended_s=0.9, tries=(replace(WON, ended_s=0.9),))
        found = worst(waterfall(short))
        assert found is not None
        assert found.name is name
    assert worst(()) is None


def test_a_held_request_shows_its_wait() -> None:
    held = replace(
        STORY,
        tries=(replace(WON, began_s=5.0, accepted_s=5.1, first_s=5.2, ended_s=5.5),),
        waits=(Wait(began_s=0.002, position=3, refused=2, ended_s=5.0),),
        ended_s=5.5,
    )
    found = worst(waterfall(held))
    assert found is not None
    assert found.name is StepName.HOLD
    assert found.seconds == pytest.approx(4.998)
    assert "place 3" in found.note


@pytest.mark.parametrize(
    ("changes", "last"),
    [
        ({"admitted_s": None, "choices": (), "tries": ()}, "admit"),
        ({"tries": ()}, "route"),
        ({"tries": (replace(WON, accepted_s=None, first_s=None, ended_s=None, outcome=""),)},
         "travel"),
        ({"tries": (replace(WON, first_s=None, ended_s=None, outcome=""),)}, "prefill"),
        ({"tries": (replace(WON, ended_s=None, outcome=""),)}, "decode"),
    ],
    ids=["reading", "routed", "asked", "placed", "answering"],
)  # fmt: skip
def test_a_request_that_runs_is_told_as_far_as_it_is(changes: dict[str, object], last: str) -> None:
    running = replace(STORY, **{"outcome": "", "ended_s": None, "timings": None, **changes})
    steps = waterfall(running)
    assert steps[-1].name == last
    if last != "route":
        assert steps[-1].start_s + steps[-1].seconds == pytest.approx(running.age_s)
