"""Nodes are started and stopped after the routers' numbers, one process for each, never twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from core.config import parse
from core.status import NodeStatus, RegionMore, Wanted
from core.types import ModelName, NodeName
from deploy.fleet import Fleet, running
from deploy.process import Pauses, Spec
from deploy.ready import RouterView
from deploy.scaling import LATE_S, Numbers
from tests.deploy.waiting import until

REGION = parse(
    """
version = 1
[models.m]
source = "package:none"
[[edges]]
name = "e"
[[regions]]
name = "here"
[regions.scale.m]
least = 0
[[regions.nodes]]
name = "d1"
role = "decode"
model = "m"
[[regions.nodes]]
name = "d2"
role = "decode"
model = "m"
"""
).region("here")


def view(wanted: int | None, *alive: str) -> RouterView:
    """What a router says; None: it has not decided yet."""
    nodes = tuple(
        NodeStatus(name=NodeName(n.name), role=n.role, model=ModelName("m"), alive=n.name in alive)
        for n in REGION.nodes
    )
    told = () if wanted is None else (
        Wanted(model=ModelName("m"), role="decode", nodes=wanted, why="queue"),
    )  # fmt: skip
    return RouterView(nodes=nodes, more=RegionMore(wanted=told))


@dataclass
class Supervised:
    fleet: Fleet
    folder: Path
    how: str = "live"
    said: list[str] = field(default_factory=list)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.numbers = Numbers(
            self.fleet, self.spec, say=self.said.append, revive=True, clock=lambda: self.now
        )

    def spec(self, name: str) -> Spec:
        return Spec(
            name, "node", "tests.deploy.stubs", (self.how, str(self.folder / name)),
            {}, self.folder / f"{name}.log",
        )  # fmt: skip

    def follow(self, *views: RouterView) -> None:
        self.numbers.follow(REGION, list(views))

    def started(self, name: str) -> bool:
        return until(lambda: (self.folder / name).exists())


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    said: list[str] = []
    with running([], say=said.append, pauses=Pauses(0.1, 0.5, 5.0)) as fleet:
        yield Supervised(fleet, tmp_path)


def test_up_and_down_again(supervised: Supervised) -> None:
    supervised.follow(view(None))
    assert list(supervised.fleet) == []

    supervised.follow(view(1))
    supervised.follow(view(1))
    assert list(supervised.fleet) == ["d1"]
    assert supervised.started("d1")
    supervised.now += 2.5
    supervised.follow(view(1, "d1"))
    supervised.follow(view(1, "d1"))

    supervised.follow(view(0, "d1"))
    process = supervised.fleet["d1"]
    assert until(lambda: process.exit_code is not None)
    assert process.exit_code == 0, "it was asked, and ended by itself"
    supervised.follow(view(1))
    assert list(supervised.fleet) == [], "it is gone before it is started again"
    supervised.follow(view(1))
    assert supervised.fleet["d1"] is not process
    assert supervised.said == [
        "d1 starts (m, queue)",
        "d1 is up after 2.5 s",
        "d1 stops (m, queue)",
        "d1 is off",
        "d1 starts (m, queue)",
    ]


def test_of_two_routers_the_one_that_wants_more_is_heard(supervised: Supervised) -> None:
    supervised.follow(view(0), view(2), view(1))
    assert list(supervised.fleet) == ["d1", "d2"]
    supervised.follow(view(2, "d1", "d2"), view(0, "d1", "d2"))
    assert not [line for line in supervised.said if "stops" in line]


def test_for_a_node_that_rests_by_order_another_one_runs(supervised: Supervised) -> None:
    told = view(1, "d1")
    resting = msgspec.structs.replace(told.nodes[0], draining=True)
    supervised.follow(view(1))
    supervised.follow(msgspec.structs.replace(told, nodes=(resting, told.nodes[1])))
    assert {line.split(" (")[0] for line in supervised.said[-2:]} == {"d1 stops", "d2 starts"}


def test_a_region_that_says_nothing_is_left_as_it_is(supervised: Supervised) -> None:
    supervised.follow(view(1))
    supervised.follow()
    assert list(supervised.fleet) == ["d1"]
    assert len(supervised.said) == 1


def test_what_a_rollout_replaces_is_not_touched(supervised: Supervised) -> None:
    supervised.fleet.reserved.add("d1")
    supervised.follow(view(2))
    assert list(supervised.fleet) == ["d2"]


def test_one_that_does_not_end_is_taken_down(supervised: Supervised) -> None:
    supervised.how = "stubborn"
    supervised.follow(view(1))
    assert supervised.started("d1")
    supervised.follow(view(0))
    process = supervised.fleet["d1"]
    supervised.now += LATE_S
    supervised.follow(view(0))
    assert process.exit_code is None
    supervised.now += 1.0
    supervised.follow(view(0))
    supervised.follow(view(0))
    assert list(supervised.fleet) == []
    assert process.exit_code == -9


def test_after_the_end_of_the_world_nothing_is_started(supervised: Supervised) -> None:
    for process in supervised.fleet.close():
        process.end(0.0)
    supervised.follow(view(2))
    assert list(supervised.fleet) == []
    assert supervised.said == []
