"""Imports and holds: blocks that come and go without a sequence that is computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.engine.lending_messages import Held
from core.engine.messages import (
    Reserved,
    SequenceFailed,
)
from core.errors import InternalError
from tests.core.engine.harness import Front, rank_config, spec
from tests.core.engine.stepping import A, B, C, D, reserve, scheduler, step

PROMPT = [100 + i for i in range(100)]
WHOLE = spec(PROMPT[:96])


@pytest.fixture(params=[0, 40], ids=["full", "window"])
def front(request: pytest.FixtureRequest) -> Iterator[Front]:
    one = Front(rank_config(blocks=40, window=request.param, window_blocks=20, scramble=True))
    yield one
    one.close()


def computed(front: Front, name: str, prompt: list[int]) -> int | None:
    watched = front.run(name, spec(prompt, max_tokens=4))
    front.finish_all()
    return watched.computed


def test_what_was_brought_is_not_computed(front: Front) -> None:
    front.bring("i", WHOLE)
    assert front.stats.blocks_used == 6
    front.adopt("i", 96)
    assert front.stats.blocks_cached == 6
    assert computed(front, "a", PROMPT) == 4
    assert computed(front, "b", [*PROMPT[:96], 7]) == 1


def test_what_the_cache_has_is_left_out(front: Front) -> None:
    computed(front, "a", PROMPT[:40])
    watched = front.bring("i", WHOLE)
    assert watched.reserved is not None
    assert watched.reserved.cached_tokens == 32
    assert min(watched.reserved.fill[0]) == 2
    front.adopt("i", 96)
    again = front.bring("j", WHOLE)
    assert again.reserved is not None
    assert not any(again.reserved.fill)
    front.adopt("j", 96)
    assert computed(front, "b", PROMPT) == 4


def test_a_start_that_is_verified_is_kept_unless_a_window_forgets(front: Front) -> None:
    front.bring("i", WHOLE)
    front.adopt("i", 48)
    assert front.stats.blocks_cached == (0 if front.script.window else 3)
    assert computed(front, "a", PROMPT) == (100 if front.script.window else 52)


def test_an_import_that_is_aborted_leaves_nothing(front: Front) -> None:
    front.bring("i", WHOLE)
    front.abort("i")
    assert (front.stats.blocks_used, front.stats.blocks_cached) == (0, 0)
    assert computed(front, "a", PROMPT) == 100


def test_what_was_computed_meanwhile_is_not_kept_twice(front: Front) -> None:
    front.bring("i", WHOLE)
    assert computed(front, "a", PROMPT) == 100
    before = front.stats.blocks_cached
    front.adopt("i", 96)
    assert front.stats.blocks_cached == before
    assert computed(front, "b", PROMPT) == 4


def test_namespaces_keep_apart(front: Front) -> None:
    front.bring("i", spec(PROMPT[:96], namespace="tenant"))
    front.adopt("i", 96)
    assert computed(front, "a", PROMPT) == 100


def test_a_hold_keeps_what_would_be_evicted(front: Front) -> None:
    computed(front, "a", PROMPT)
    held = front.hold("h", WHOLE).held
    assert held is not None
    assert held.tokens == 96
    for number in range(8):  # more than the pool has room for beside it
        front.run(f"b{number}", spec(range(1000 * number, 1000 * number + 150), max_tokens=2))
        front.settle()
    front.release("h")  # looks at the content once more
    front.finish_all()
    assert computed(front, "again", PROMPT) == 4
    for number in range(8):
        front.run(f"c{number}", spec(range(2000 + number, 2150 + number), max_tokens=2))
        front.settle()
    assert computed(front, "at last", PROMPT) == 100


def test_a_hold_says_what_it_lacks(front: Front) -> None:
    computed(front, "a", PROMPT[:40])
    watched = front.hold("h", WHOLE)
    assert watched.held is not None
    assert watched.held.tokens == 32
    nothing = front.hold("n", spec([9] * 32))
    assert nothing.held is not None
    assert nothing.held.tokens == 0
    front.abort("h")
    front.release("n")
    front.finish_all()


# ---------------------------------------------------------------- the scheduler alone


def test_an_import_takes_nothing_that_others_wait_for() -> None:
    of = scheduler(blocks=10, sequences=1)
    of.run(A, spec(range(40)))
    step(of)
    of.run(B, spec(range(100, 180)))  # waits for the slot
    of.take()
    of.bring(C, tuple(range(300, 332)), "", priority=0)  # 10 − 3 − 5 − 1 spare = 1
    (reply,) = of.take().replies
    assert isinstance(reply, SequenceFailed)
    assert reply.code == "no_capacity"
    of.bring(C, tuple(range(300, 316)), "", priority=0)
    (granted,) = of.take().replies
    assert isinstance(granted, Reserved)
    of.roster.check_integrity()


def test_a_start_that_came_into_doubt_takes_the_import_along() -> None:
    of = scheduler()
    of.run(A, spec(range(40), max_tokens=200))
    step(of)
    of.bring(B, tuple(range(64)), "", priority=0)
    (reply,) = of.take().replies
    assert isinstance(reply, Reserved)
    assert reply.cached_tokens == 32
    step(of, **{str(A): "its KV is broken"})  # type: ignore[arg-type] # of A, not of the token
    of.adopt(B, 64)
    of.roster.check_integrity()
    assert len(of.blocks.cache) == 0
    assert of.blocks.used == 0


def test_what_makes_no_sense_is_a_fault_of_the_front() -> None:
    of = scheduler()
    with pytest.raises(InternalError, match="whole blocks"):
        of.bring(A, tuple(range(17)), "", priority=0)
    of.hold(B, tuple(range(32)), "")
    (reply,) = of.take().replies
    assert isinstance(reply, Held)
    with pytest.raises(InternalError, match="held"):
        of.adopt(B, 32)
    of.adopt(D, 32)  # unknown: aborted meanwhile
    of.release(B)
    reserve(of, C, spec(range(40)))
    of.abort(C)
    assert of.blocks.used == 0
