"""A rank lets go of a namespace: nothing stays cached, nothing is used again before it is blank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.engine.messages import Abort, Stepped
from core.engine.plan import SequenceId
from core.engine.purge_messages import Purge, Purged, Scrubbed
from tests.core.engine.harness import Front, rank_config, spec


@pytest.fixture
def front() -> Iterator[Front]:
    one = Front(rank_config(blocks=32))
    yield one
    one.close()


def purge(front: Front, namespace: str) -> list[Purged]:
    front.engine.handle(Purge(namespace))
    return [one for one in front.engine.messages() if isinstance(one, Purged)]


def test_a_purged_namespace_has_nothing_cached_and_another_all(front: Front) -> None:
    for name in ("a", "b"):
        front.run(name, spec(range(100, 140), namespace=name))
    front.settle()
    assert front.stats.blocks_cached == 10
    front.engine.handle(Purge("a"))
    told = front.engine.messages()
    (purged,) = [one for one in told if isinstance(one, Purged)]
    assert (purged.namespace, purged.cached_blocks, len(purged.blocks[0])) == ("a", 5, 5)
    (stepped,) = [one for one in told if isinstance(one, Stepped)]
    assert len(stepped.evicted) == 5
    assert stepped.stats.blocks_cached == 5
    front.mirror.difference_update(stepped.evicted)
    front.engine.handle(Scrubbed("a"))
    for name, computed in (("b", 8), ("a", 40)):
        again = front.run(f"again {name}", spec(range(100, 140), namespace=name))
        front.settle()
        assert again.tokens == [*range(100, 140), 1]
        assert again.computed == computed


def test_blocks_stay_out_of_use_until_they_are_scrubbed(front: Front) -> None:
    front.run("a", spec(range(100, 140), namespace="a"))
    front.settle()
    assert len(purge(front, "a")) == 1
    available = front.engine.scheduler.blocks.available
    assert available == 32 - 5
    front.engine.handle(Scrubbed("a"))
    assert front.engine.scheduler.blocks.available == 32


def test_a_purge_is_told_when_the_last_step_with_its_blocks_is_over(front: Front) -> None:
    front.run("a", spec(range(100, 140), namespace="a"))
    front.engine.fill()
    front.all["a"].stage = "aborted"
    front.engine.handle(Abort(SequenceId("a")))
    assert purge(front, "a") == []
    front.engine.collect()
    (purged,) = [one for one in front.engine.messages() if isinstance(one, Purged)]
    assert len(purged.blocks[0]) == 3
    assert [one for one in front.engine.messages() if isinstance(one, Purged)] == []


def test_a_namespace_that_is_not_known_is_purged_at_once(front: Front) -> None:
    (purged,) = purge(front, "nobody")
    assert (purged.cached_blocks, purged.blocks) == (0, ((),))
