from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.engine.messages import Abort, Shutdown, Stepped
from core.engine.plan import SequenceId
from core.types import FinishReason
from tests.core.engine.harness import Front, rank_config, spec


@pytest.fixture
def front() -> Iterator[Front]:
    one = Front(rank_config(blocks=32))
    yield one
    one.close()


def test_a_sequence_runs_to_its_end_and_gauges_come_back(front: Front) -> None:
    watched = front.run("a", spec(range(100, 140)))
    assert front.stats.waiting == 1
    assert front.stats.prefill_backlog_tokens == 40
    front.step()
    assert (front.stats.running, front.stats.waiting) == (1, 0)
    front.settle()
    assert watched.tokens == [*range(100, 140), 1]
    assert watched.finish is FinishReason.STOP
    assert front.stats.running == front.stats.blocks_used == 0
    assert front.stats.blocks_cached == 5
    assert front.stats.generated_tokens == 41


def test_an_abort_is_seen_in_the_gauges_without_a_step(front: Front) -> None:  # B25
    front.run("a", spec(range(100, 140)))
    front.step()
    assert front.stats.blocks_used == 3
    front.all["a"].stage = "aborted"
    front.engine.handle(Abort(SequenceId("a")))
    (message,) = front.engine.messages()
    assert isinstance(message, Stepped)
    assert message.outputs == ()
    assert (message.stats.running, message.stats.blocks_used) == (0, 0)
    assert front.engine.messages() == []


def test_nothing_is_said_when_nothing_changed(front: Front) -> None:
    assert not front.engine.step()
    assert front.engine.messages() == []


def test_a_refusal_does_not_wait_for_a_step(front: Front) -> None:
    watched = front.run("a", spec([-1]))
    assert watched.code == "invalid_request"
    assert front.steps == 0


def test_shutdown_is_noted(front: Front) -> None:
    assert not front.engine.stopping
    front.engine.handle(Shutdown())
    assert front.engine.stopping
