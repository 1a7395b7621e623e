"""What a rollout does and how it is taken back, told from topologies alone."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from core.config import Edge, Limits, Model, Node, Region, Router, Topology
from core.config_scale import Scale
from core.config_tenants import Tenant
from core.errors import ConfigError
from core.types import Role
from deploy.fleet import WorldEnds
from deploy.rollout.act import RolledBack, roll_out
from deploy.rollout.back import way_back
from deploy.rollout.plan import Ran, Standing, Wish, names_in, plan
from deploy.rollout.steps import (
    Beside,
    Heard,
    Idle,
    Kind,
    Ready,
    Replace,
    Reread,
    Rest,
    Start,
    Step,
    Stop,
    Watch,
    Weigh,
)

HERE, THERE = "/releases/here", "/releases/there"


def region(name: str, *nodes: tuple[str, Role], routers: int = 1, model: str = "m") -> Region:
    return Region(
        name=name,
        nodes=tuple(Node(name=f"{name}-{one}", role=role, model=model) for one, role in nodes),
        http="127.0.0.1:1",
        grpc="127.0.0.1:2",
        routers=(Router(),) * (routers - 1),
    )


SPLIT = (("read", Role.PREFILL), ("write", Role.DECODE))
TWICE = (("a", Role.COMBINED), ("b", Role.COMBINED))


def topology(*regions: Region) -> Topology:
    return Topology(
        version=1,
        models={"m": Model(source="x"), "other": Model(source="y")},
        edges=(Edge(name="ams", listen="127.0.0.1:3"), Edge(name="nyc", listen="127.0.0.1:4")),
        regions=regions,
    )


TWO = topology(region("eu", *SPLIT), region("us", *SPLIT))


def standing(world: Topology, **more: Any) -> Standing:
    names = [
        *(door for one in world.regions for door, _ in one.doors),
        *(node.name for one in world.regions for node in one.nodes),
        *(edge.name for edge in world.edges),
    ]
    given: dict[str, Any] = {
        "processes": dict.fromkeys(names, Ran(world, HERE)),
        "serving": frozenset(one.name for one in world.regions),
        **more,
    }
    return Standing(**given)


def wish(world: Topology, unit: str, **more: Any) -> Wish:
    given: dict[str, Any] = {"unit": unit, "topology": world, **more}
    return Wish(**given)


WHOLE = ("eu", "eu-read", "eu-write")
REGION_REPLACED = (
    Rest(Kind.REGION, "eu", True),
    Idle(Kind.REGION, "eu"),
    Replace(WHOLE),
    Ready(WHOLE),
    Heard("eu"),
    Rest(Kind.REGION, "eu", False),
)


@pytest.mark.parametrize("unit", ["ams", "eu"])
def test_what_has_not_changed_is_left_alone(unit: str) -> None:
    assert plan(wish(TWO, unit), standing(TWO)) == ()


@pytest.mark.parametrize("more", [{"again": True}, {"release": THERE}])
def test_an_edge_is_replaced_beside_itself(more: dict[str, Any]) -> None:
    assert plan(wish(TWO, "ams", **more), standing(TWO)) == (Beside("ams"),)


def test_a_region_that_others_stand_in_for_is_replaced_at_once() -> None:
    assert plan(wish(TWO, "eu", release=THERE), standing(TWO)) == REGION_REPLACED


def test_what_an_operator_drained_stays_drained() -> None:
    steps = plan(wish(TWO, "eu", again=True), standing(TWO, resting=frozenset({"eu"})))
    assert steps == REGION_REPLACED[:-1]


def test_a_canary_has_a_share_of_the_weight_until_it_was_watched() -> None:
    before = standing(TWO, weights={"eu": 40})
    steps = plan(wish(TWO, "eu", release=THERE, canary=10, watch_s=5), before)
    assert steps[5:] == (
        Weigh("eu", 4),
        Rest(Kind.REGION, "eu", False),
        Watch("eu", 5),
        Weigh("eu", 40),
    )
    least = plan(wish(TWO, "eu", release=THERE, canary=1), standing(TWO, weights={"eu": 3}))
    assert Weigh("eu", 1) in least
    usual = plan(wish(TWO, "eu", release=THERE, canary=25), standing(TWO))
    assert Weigh("eu", 25) in usual
    assert usual[-1] == Weigh("eu", 0)


def test_a_changed_key_replaces_who_reads_it() -> None:
    eu, us = TWO.regions
    nodes = (eu.nodes[0], replace(eu.nodes[1], max_sequences=7))
    changed = replace(TWO, regions=(replace(eu, nodes=nodes), us))
    steps = plan(wish(changed, "eu"), standing(TWO))
    assert names_in(steps) == {"eu-write"}
    assert plan(wish(changed, "us"), standing(TWO)) == ()
    limits = replace(TWO, tenants={"harbour": Tenant()})
    assert plan(wish(limits, "eu"), standing(TWO)) == ()
    assert plan(wish(limits, "nyc"), standing(TWO)) == (Beside("nyc"),)


ALONE = standing(TWO, serving=frozenset({"eu"}))


def test_without_a_stand_in_prefill_goes_alone_and_the_rest_with_a_hold() -> None:
    steps = plan(wish(TWO, "eu", again=True), ALONE)
    rest = ("eu", "eu-write")
    assert steps == (
        Rest(Kind.NODE, "eu-read", True),
        Idle(Kind.NODE, "eu-read"),
        Replace(("eu-read",)),
        Ready(("eu-read",)),
        Rest(Kind.NODE, "eu-read", False),
        Rest(Kind.REGION, "eu", True),
        Idle(Kind.REGION, "eu"),
        Replace(rest),
        Ready(rest),
        Heard("eu"),
        Rest(Kind.REGION, "eu", False),
    )


def test_a_lone_region_of_two_of_each_never_rests() -> None:
    world = topology(region("eu", *TWICE, routers=2))
    steps = plan(wish(world, "eu", again=True), standing(world))
    assert [one.names for one in steps if isinstance(one, Replace)] == [
        ("eu-a",), ("eu-b",), ("eu",), ("eu.2",),
    ]  # fmt: skip
    assert not [one for one in steps if isinstance(one, Rest) and one.kind is Kind.REGION]
    assert steps[-1] == Heard("eu")


def test_a_node_that_comes_is_started_once_the_router_knows_it() -> None:
    eu, us = TWO.regions
    more = replace(eu, nodes=(*eu.nodes, Node(name="eu-more", role=Role.DECODE, model="m")))
    steps = plan(wish(replace(TWO, regions=(more, us)), "eu"), standing(TWO))
    assert steps == (Reread("eu"), Start("eu-more"), Ready(("eu-more",)), Heard("eu"))


def test_a_node_that_goes_ends_what_it_has_before_the_router_forgets_it() -> None:
    world = topology(region("eu", *TWICE), TWO.regions[1])
    less = topology(region("eu", TWICE[0]), TWO.regions[1])
    steps = plan(wish(less, "eu"), standing(world))
    assert steps == (
        Reread("eu"), Rest(Kind.NODE, "eu-b", True), Idle(Kind.NODE, "eu-b"), Stop("eu-b"),
    )  # fmt: skip
    assert names_in(steps) == {"eu-b"}
    assert plan(wish(less, "us"), standing(world)) == ()
    assert way_back(steps, standing(world)) == (
        Reread("eu", back=True), Start("eu-b"), Ready(("eu-b",)), Rest(Kind.NODE, "eu-b", False),
    )  # fmt: skip
    assert way_back(steps[:3], standing(world)) == (
        Reread("eu", back=True), Rest(Kind.NODE, "eu-b", False),
    )  # fmt: skip
    resting = standing(world, resting=frozenset({"eu-b"}))
    assert way_back(steps, resting) == (
        Reread("eu", back=True), Start("eu-b"), Ready(("eu-b",)), Rest(Kind.NODE, "eu-b", True),
    ), "a router that forgot a node has forgotten the operator's order as well"  # fmt: skip


def test_a_node_of_another_name_comes_before_the_first_one_goes() -> None:
    world = topology(region("eu", TWICE[0]), TWO.regions[1])
    other = topology(region("eu", TWICE[1]), TWO.regions[1])
    steps = plan(wish(other, "eu"), standing(world))
    assert steps == (
        Reread("eu"), Start("eu-b"), Ready(("eu-b",)), Heard("eu"),
        Rest(Kind.NODE, "eu-a", True), Idle(Kind.NODE, "eu-a"), Stop("eu-a"),
    )  # fmt: skip


def test_what_a_router_takes_in_as_it_runs() -> None:
    eu, us = TWO.regions
    busier = replace(TWO, regions=(replace(eu, split_min_tokens=7), us))
    assert plan(wish(busier, "eu"), standing(TWO)) == (Reread("eu"),)
    two = topology(region("eu", *SPLIT, routers=2), us)
    scaled = replace(two, regions=(replace(two.regions[0], scale={"m": Scale(least=0)}), us))
    assert plan(wish(scaled, "eu"), standing(two)) == (Reread("eu"), Reread("eu.2"))
    named = replace(TWO, models={**TWO.models, "m": Model(source="x", aliases=("one",))})
    assert plan(wish(named, "eu"), standing(TWO)) == (Reread("eu"),)
    assert plan(wish(named, "ams"), standing(TWO)) == (Beside("ams"),)
    again = plan(wish(busier, "eu", again=True), standing(TWO))
    assert not [step for step in again if isinstance(step, Reread)]
    slower = replace(TWO, limits=Limits(queue=3))
    assert Replace(WHOLE) in plan(wish(slower, "eu"), standing(TWO))


def test_a_node_that_runs_on_demand_is_taken_in_and_not_started() -> None:
    eu, us = TWO.regions
    more = replace(
        eu,
        nodes=(*eu.nodes, Node(name="eu-more", role=Role.COMBINED, model="other")),
        scale={"other": Scale(least=0)},
    )
    steps = plan(wish(replace(TWO, regions=(more, us)), "eu"), standing(TWO))
    assert steps == (Reread("eu"), Start("eu-more", later=True), Heard("eu"))
    assert way_back(steps, standing(TWO)) == (Stop("eu-more"), Reread("eu", back=True))


def test_units_go_back_together_the_last_one_first() -> None:
    units: list[list[Step]] = [[Reread("eu")], [Reread("us")], [Beside("ams"), Beside("nyc")]]
    stage = Broken(Beside("nyc"))
    with pytest.raises(RolledBack, match="the world is as it was"):
        roll_out(units, standing(TWO), stage, lambda _line: None)
    assert stage.taken[4:] == [
        Beside("ams", back=True),
        Beside("nyc", back=True),
        Reread("us", back=True),
        Reread("eu", back=True),
    ]


def test_a_machine_without_room_is_a_failure_like_any_other() -> None:
    full = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    stage = Broken(Beside("ams"), Reread("us", back=True), error=full)
    with pytest.raises(RolledBack, match=r"Too many open files[\s\S]*way back failed as well"):
        roll_out([[Reread("us")], [Beside("ams")]], standing(TWO), stage, lambda _line: None)
    assert stage.taken[2:] == [Beside("ams", back=True), Reread("us", back=True)]


@pytest.mark.parametrize(
    ("world", "unit", "more", "words"),
    [
        (TWO, "ams", {"canary": 5}, "is an edge"),
        (TWO, "nowhere", {}, "neither an edge nor a region"),
    ],
)
def test_wishes_that_cannot_be(
    world: Topology, unit: str, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(wish(world, unit, again=True, **more), standing(TWO))


def test_a_canary_needs_somebody_to_compare_with() -> None:
    with pytest.raises(ConfigError, match="needs another region"):
        plan(wish(TWO, "eu", again=True, canary=10), ALONE)


class Broken:
    """A stage that takes note, and fails at some steps."""

    def __init__(self, *failing: Step, error: Exception | None = None) -> None:
        self.taken: list[Step] = []
        self._failing = failing
        self._error = error or ConfigError("it broke")

    def take(self, step: Step) -> None:
        self.taken.append(step)
        if step in self._failing:
            raise self._error


def rolled_back(steps: Sequence[Step], *failing: Step) -> tuple[list[Step], str]:
    """What was taken after the failure, and the last word."""
    stage = Broken(*failing)
    with pytest.raises(RolledBack) as failed:
        roll_out([steps], standing(TWO), stage, lambda _line: None)
    return stage.taken[stage.taken.index(failing[0]) + 1 :], str(failed.value)


CANARY = plan(wish(TWO, "eu", release=THERE, canary=10, watch_s=5), standing(TWO))
PUT_BACK = [Replace(WHOLE, back=True), Ready(WHOLE)]


@pytest.mark.parametrize(
    ("steps", "failing", "back"),
    [
        (REGION_REPLACED, Idle(Kind.REGION, "eu"), [Rest(Kind.REGION, "eu", False)]),
        (
            REGION_REPLACED,
            Ready(WHOLE),
            [*PUT_BACK, Heard("eu"), Rest(Kind.REGION, "eu", False)],
        ),
        (
            CANARY,
            Watch("eu", 5),
            [
                Rest(Kind.REGION, "eu", True),
                Idle(Kind.REGION, "eu", must=False),
                *PUT_BACK,
                Heard("eu"),
                Weigh("eu", 0),
                Rest(Kind.REGION, "eu", False),
            ],
        ),
        ((Beside("ams"),), Beside("ams"), [Beside("ams", back=True)]),
        (
            plan(wish(TWO, "eu", again=True), ALONE),
            Idle(Kind.REGION, "eu"),
            [
                Rest(Kind.NODE, "eu-read", True),
                Idle(Kind.NODE, "eu-read", must=False),
                Replace(("eu-read",), back=True),
                Ready(("eu-read",)),
                Rest(Kind.NODE, "eu-read", False),
                Rest(Kind.REGION, "eu", False),
            ],
        ),
    ],
)
def test_the_way_back(steps: tuple[Step, ...], failing: Step, back: list[Step]) -> None:
    if Ready(WHOLE) == failing:  # the way back waits for the same names: it may fail once
        taken = list(way_back(steps[: steps.index(failing) + 1], standing(TWO)))
        assert taken == back
        return
    taken, words = rolled_back(steps, failing)
    assert taken == back
    assert words == "it broke\nthe world is as it was"


def test_what_was_started_is_stopped_again() -> None:
    steps = (Start("eu-more"), Ready(("eu-more",)))
    assert rolled_back(steps, Ready(("eu-more",)))[0] == [Stop("eu-more")]


def test_a_way_back_that_fails_is_walked_to_its_end_and_said() -> None:
    back = Replace(WHOLE, back=True)
    taken, words = rolled_back(CANARY, Watch("eu", 5), back)
    assert taken[-1] == Rest(Kind.REGION, "eu", False)
    assert "and the way back failed as well: replace eu, eu-read, eu-write by what it was" in words


def test_the_end_of_the_world_is_not_taken_back() -> None:
    class Ending(Broken):
        def take(self, step: Step) -> None:
            super().take(step)
            raise WorldEnds

    stage = Ending()
    with pytest.raises(WorldEnds):
        roll_out([CANARY], standing(TWO), stage, lambda _line: None)
    assert stage.taken == [CANARY[0]]
