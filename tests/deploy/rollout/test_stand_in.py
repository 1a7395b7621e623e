"""Whether others can serve what a region gets, so that it may rest."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from core.config import Topology
from core.types import Role
from deploy.rollout.plan import Ran, has_stand_in, plan
from deploy.rollout.steps import Kind, Rest
from tests.deploy.rollout.test_plan import HERE, SPLIT, TWO, region, standing, topology, wish


@pytest.mark.parametrize(
    ("world", "serving", "stands"),
    [
        (TWO, {"eu", "us"}, True),
        (TWO, {"eu"}, False),
        (topology(TWO.regions[0], region("us", *SPLIT, model="other")), {"eu", "us"}, False),
        (topology(TWO.regions[0], region("us", ("r", Role.PREFILL))), {"eu", "us"}, False),
        (replace(TWO, residency={"bank": ("eu",)}), {"eu", "us"}, False),
        (replace(TWO, residency={"bank": ("us",)}), {"eu", "us"}, True),
        (replace(TWO, residency={"bank": ("eu", "us")}), {"eu", "us"}, True),
    ],
)
def test_who_stands_in(world: Topology, serving: set[str], stands: bool) -> None:
    before = standing(world, serving=frozenset(serving))
    assert has_stand_in(world.regions[0], before, world) is stands


US_READS = topology(TWO.regions[0], region("us", ("read", Role.PREFILL)))


@pytest.mark.parametrize(
    ("ran", "of", "stands"),
    [
        (US_READS, ("us",), False),
        (replace(TWO, residency={"bank": ("eu",)}), ("nyc",), False),
        (replace(TWO, residency={"bank": ("eu",)}), ("us",), True),
        (topology(region("eu", *SPLIT, model="other"), TWO.regions[1]), ("eu",), False),
    ],
)
def test_who_stands_in_is_told_by_what_runs(
    ran: Topology, of: tuple[str, ...], stands: bool
) -> None:
    """A unit that was not given the newest topology yet does not do what it says."""
    before = standing(TWO)
    processes = {**before.processes, **dict.fromkeys(of, Ran(ran, HERE))}
    before = standing(TWO, processes=processes)
    assert has_stand_in(ran.region("eu"), before, TWO) is stands
    steps = plan(wish(TWO, "eu", again=True), before)
    assert (steps[0] == Rest(Kind.REGION, "eu", True)) is stands


def test_a_wish_for_more_takes_no_stand_in_away() -> None:
    """Nor does it give one: what is asked for now is what a region has now."""
    other = topology(region("eu", *SPLIT, model="other"), TWO.regions[1])
    assert plan(wish(other, "eu", again=True), standing(TWO))[0] == Rest(Kind.REGION, "eu", True)
    before = standing(US_READS)
    assert plan(wish(TWO, "eu", again=True), before)[0] == Rest(Kind.NODE, "eu-read", True)


def test_a_node_that_rests_stands_in_for_nobody() -> None:
    before = standing(TWO, resting=frozenset({"us-write"}))
    assert not has_stand_in(TWO.regions[0], before, TWO)


def test_what_cannot_be_seen_runs_as_it_is_wished() -> None:
    """Over ssh, a host that does not answer."""
    known = {name: ran for name, ran in standing(TWO).processes.items() if "us" not in name}
    assert has_stand_in(TWO.regions[0], standing(TWO, processes=known), TWO)
    assert not has_stand_in(TWO.regions[0], standing(TWO, processes=known), US_READS)
