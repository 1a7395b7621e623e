"""A region and an edge that come to a running world, told from topologies alone."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from core.config import Edge, Node, Router, Topology
from core.config_scale import Scale
from core.errors import ConfigError
from core.types import Role
from deploy.rollout.arrivals import arrive, newcomers
from deploy.rollout.back import way_back
from deploy.rollout.steps import (
    Beside,
    Heard,
    Hosting,
    Idle,
    Kind,
    Ready,
    Reread,
    Rest,
    Shelve,
    Start,
    Step,
    Stop,
)
from tests.deploy.rollout.test_plan import SPLIT, TWO, region, standing, topology, wish

ASIA = region("asia", *SPLIT, routers=2)
SFO = Edge(name="sfo", listen="127.0.0.1:5")


def arrivals(after: Topology, unit: str, **more: Any) -> list[tuple[Step, ...]]:
    return arrive(wish(after, unit, **more), *newcomers(TWO, after), standing(TWO))


def test_a_region_comes_up_before_anybody_is_told() -> None:
    names = ("asia", "asia.2", "asia-read", "asia-write")
    plans = arrivals(topology(*TWO.regions, ASIA), "asia")
    assert plans == [
        (*(Start(name) for name in names), Ready(names)),
        (Reread("eu"),),
        (Reread("us"),),
        (Beside("ams"),),
        (Beside("nyc"),),
        (Heard("asia"),),
    ]
    assert way_back(plans[0], standing(TWO)) == tuple(Stop(name) for name in reversed(names))


def test_an_edge_comes_alone() -> None:
    after = replace(TWO, edges=(*TWO.edges, SFO))
    plans = [steps for steps in arrivals(after, "sfo") if steps]
    assert plans == [(Start("sfo"), Ready(("sfo",)))]


def test_an_edge_has_the_workers_of_the_others_before_anybody_asks_it() -> None:
    after = replace(TWO, edges=(*TWO.edges, replace(SFO, admin="127.0.0.1:6")))
    before = standing(TWO, shelved=frozenset({"chat", "apt"}))
    plans = arrive(wish(after, "sfo"), *newcomers(TWO, after), before)
    steps = (Shelve("sfo", ("apt", "chat")), Start("sfo"), Ready(("sfo",)), Hosting("sfo"))
    assert steps in plans
    assert way_back(steps, before) == (Stop("sfo"), Shelve("sfo", ("apt", "chat"), back=True))
    without = replace(TWO, edges=(*TWO.edges, SFO))
    assert (Start("sfo"), Ready(("sfo",))) in arrive(
        wish(without, "sfo"), *newcomers(TWO, without), before
    )


def test_nodes_that_go_when_another_region_comes_are_seen_off() -> None:
    eu, us = TWO.regions
    less = replace(eu, nodes=eu.nodes[:-1])
    after = topology(less, us, ASIA)
    plans = arrive(wish(after, "asia"), *newcomers(TWO, after), standing(TWO))
    gone = eu.nodes[-1].name
    steps = (Reread("eu"), Rest(Kind.NODE, gone, True), Idle(Kind.NODE, gone), Stop(gone))
    assert steps in plans


def test_all_that_is_new_comes_together() -> None:
    after = replace(topology(*TWO.regions, ASIA), edges=(*TWO.edges, SFO))
    for unit in ("asia", "sfo"):
        steps = [step for plan in arrivals(after, unit) for step in plan]
        assert Start("sfo") in steps
        assert steps.index(Beside("nyc")) < steps.index(Start("sfo")) < steps.index(Heard("asia"))


def test_a_node_on_demand_waits_for_somebody_who_asks() -> None:
    nodes = (Node(name="asia-a", role=Role.COMBINED, model="m"),)
    sleepy = replace(ASIA, nodes=nodes, routers=(), scale={"m": Scale(least=0)})
    plans = arrivals(topology(*TWO.regions, sleepy), "asia")
    assert plans[0] == (Start("asia"), Start("asia-a", later=True), Ready(("asia",)))


@pytest.mark.parametrize(
    ("unit", "more", "words"),
    [
        ("eu", {}, "asia is new in this topology: .* `skerry deploy asia --topology FILE` first"),
        ("nowhere", {}, "asia is new"),
        ("asia", {"canary": 5}, "nothing to compare a canary with"),
    ],
)
def test_what_cannot_be(unit: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arrivals(topology(*TWO.regions, ASIA), unit, **more)


def test_nothing_is_new_in_the_same() -> None:
    assert newcomers(TWO, TWO) == ([], [])
    moved = replace(TWO, regions=(replace(TWO.regions[0], routers=(Router(),)), TWO.regions[1]))
    assert newcomers(TWO, moved) == ([], [])
