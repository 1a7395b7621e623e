"""Nodes are started and stopped after the routers' numbers, one process for each, never twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from core.config import parse
from core.orders import RETIRE
from core.status import NodeStatus, RegionMore, Wanted
from core.types import ModelName, NodeName
from deploy.fleet import Fleet, running
from deploy.process import Pauses, Spec
from deploy.ready import RouterView
from deploy.scaling import LATE_S, Numbers, Sight, merged, sights_of
from tests.deploy.waiting import is_gone, until

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
    how: str = "node"
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

    def followed(self, *views: RouterView) -> list[str]:
        self.follow(*views)
        return list(self.fleet)

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
    assert until(lambda: supervised.followed(view(0)) == []), "its children are gone as well"
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


def test_what_a_rollout_takes_out_just_then_is_not_started(supervised: Supervised) -> None:
    def spec(name: str) -> Spec:
        supervised.fleet.reserve(name)
        return supervised.spec(name)

    numbers = Numbers(supervised.fleet, spec, say=supervised.said.append, revive=True)
    numbers.follow(REGION, [view(1)])
    assert list(supervised.fleet) == []
    assert supervised.said == []


def test_one_that_does_not_end_is_taken_down(supervised: Supervised) -> None:
    supervised.how = "loath"
    supervised.follow(view(1))
    assert supervised.started("d1")
    supervised.follow(view(0))
    process = supervised.fleet["d1"]
    supervised.now += LATE_S
    supervised.follow(view(0))
    assert process.exit_code is None
    supervised.now += 1.0
    (supervised.folder / "d1.hold").touch()  # its child would stay
    assert until(lambda: supervised.followed(view(0)) == [], within_s=10.0)
    assert process.exit_code == -9


def test_after_the_end_of_the_world_nothing_is_started(supervised: Supervised) -> None:
    for process in supervised.fleet.close():
        process.end(0.0)
    supervised.follow(view(2))
    assert list(supervised.fleet) == []
    assert supervised.said == []


POOL = parse(
    """
version = 1
[models.one]
source = "package:none"
[models.two]
source = "package:none"
[[edges]]
name = "e"
[[regions]]
name = "here"
[regions.pools.gpu]
turn_s = 10
[regions.scale.one]
least = 0
[regions.scale.two]
least = 0
[[regions.nodes]]
name = "a"
role = "combined"
model = "one"
pool = "gpu"
[[regions.nodes]]
name = "b"
role = "combined"
model = "two"
pool = "gpu"
"""
).region("here")
QUIET = {"one": Wanted(model=ModelName("one"), role="combined", nodes=1),
         "two": Wanted(model=ModelName("two"), role="combined", nodes=0)}  # fmt: skip


def asked(model: str) -> Wanted:
    return Wanted(
        model=ModelName(model), role="combined", nodes=1, why="asked", waiting=1, waiting_s=1.0,
        in_use=True,
    )  # fmt: skip


def shared(*wanted: Wanted, alive: str = "", placed: int = 0, idle_s: float = 0.0) -> RouterView:
    nodes = tuple(
        NodeStatus(
            name=NodeName(n.name), role=n.role, model=ModelName(n.model), alive=n.name == alive,
            pool="gpu", placed=placed, idle_s=idle_s,
        )
        for n in POOL.nodes
    )  # fmt: skip
    return RouterView(
        nodes=nodes, more=RegionMore(wanted=tuple((QUIET | {w.model: w for w in wanted}).values()))
    )


def looked(supervised: Supervised, *views: RouterView) -> list[str]:
    supervised.numbers.follow(POOL, views, deadline_s=60.0)
    return list(supervised.fleet)


def test_a_place_changes_hands_when_its_owner_has_gone_with_all_that_it_started(
    supervised: Supervised,
) -> None:
    assert looked(supervised, shared(asked("one"))) == ["a"]
    assert supervised.started("a")
    child = int((supervised.folder / "a.child").read_text())
    busy = shared(asked("two"), alive="a", placed=1)
    looked(supervised, busy)
    supervised.now += 9.0
    looked(supervised, busy)
    assert supervised.said[-1] == "a is up after 0.0 s", "it has its turn"
    looked(supervised)  # a router that does not answer at once begins no new one
    supervised.now += 1.0
    process = supervised.fleet["a"]
    hold = supervised.folder / "a.hold"
    hold.touch()
    looked(supervised, busy)
    assert supervised.said[-1] == "a gives its place to two"
    assert until(lambda: process.exit_code is not None)
    assert looked(supervised, shared(asked("two"))) == ["a"], "its child has the memory still"
    hold.unlink()
    assert until(lambda: "b" in looked(supervised, shared(asked("two"))))
    assert (process.exit_code, is_gone(process.pid), is_gone(child)) == (0, True, True)
    assert supervised.said[-2:] == ["a is off", "b starts (two, asked)"]
    assert list(supervised.fleet) == ["b"]


def test_what_a_rollout_put_in_the_place_of_one_that_leaves_is_not_taken_down(
    supervised: Supervised,
) -> None:
    supervised.how = "loath"
    looked(supervised, shared(asked("one")))
    assert supervised.started("a")
    looked(supervised, shared(asked("two"), alive="a", idle_s=1.0))
    assert supervised.said[-1] == "a gives its place to two"
    supervised.fleet.reserved.add("a")
    supervised.fleet.stop(["a"], 0.0)
    again = supervised.fleet.start(supervised.spec("a"))
    supervised.now += 1000.0
    looked(supervised, shared(asked("two")))
    supervised.fleet.reserved.clear()
    looked(supervised, shared(asked("two")))
    assert again.exit_code is None
    assert list(supervised.fleet) == ["a"]


def test_one_that_refuses_its_configuration_holds_no_place(supervised: Supervised) -> None:
    supervised.how = "live"  # SIGUSR1 has it say so
    looked(supervised, shared(asked("one")))
    assert supervised.started("a")
    process = supervised.fleet["a"]
    process.kill(RETIRE)
    assert until(lambda: process.exit_code is not None)
    assert looked(supervised, shared(asked("one"), asked("two"))) == ["a", "b"]
    none = Wanted(model=ModelName("one"), role="combined", nodes=0)
    assert looked(supervised, shared(none, asked("two"))) == ["b"], "it may be tried again"


def test_what_several_routers_say_is_taken_together() -> None:
    first = Wanted(model=ModelName("m"), role="decode", nodes=2, why="queue", waiting=1)
    second = Wanted(
        model=ModelName("m"), role="decode", nodes=1, why="calm", waiting=4, waiting_s=9.0,
        in_use=True,
    )  # fmt: skip
    for order in ([first, second], [second, first]):
        (one,) = merged(iter(order)).values()
        assert (one.nodes, one.why, one.waiting, one.waiting_s, one.in_use) == (
            2, "queue", 4, 9.0, True,
        )  # fmt: skip
    seen = sights_of(
        POOL,
        [shared(alive="a", idle_s=9.0), shared(alive="a", placed=2), shared(idle_s=1.0)],
    )
    assert seen["a"] == Sight(alive=True, placed=2, idle_s=0.0)
    assert sights_of(POOL, [shared(), shared(alive="a", idle_s=3.0)])["a"].idle_s == 3.0
    both = [shared(alive="a", idle_s=3.0), shared(alive="a", idle_s=9.0)]
    assert sights_of(POOL, both)["a"].idle_s == 3.0
