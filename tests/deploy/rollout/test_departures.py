"""A region and an edge that leave a running world, told from topologies alone."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from core.config import Edge, Model, Node, Topology
from core.config_tenants import Tenant
from core.errors import ConfigError
from core.types import Role
from deploy.rollout.back import way_back
from deploy.rollout.departures import depart, leavers
from deploy.rollout.plan import names_in
from deploy.rollout.steps import (
    Beside,
    Empty,
    Idle,
    Kind,
    Leave,
    Ready,
    Reread,
    Rest,
    Start,
    Step,
    Stop,
)
from tests.deploy.rollout.test_plan import HERE, SPLIT, TWO, region, standing, topology, wish

ASIA = region("asia", *SPLIT, routers=2)
ALONE = region("asia", ("a", Role.COMBINED), model="other")
THREE = topology(*TWO.regions, ASIA)
NODES, DOORS = ("asia-read", "asia-write"), ("asia", "asia.2")


def departures(
    was: Topology, after: Topology, unit: str, before: dict[str, Any] | None = None, **more: Any
) -> list[tuple[Step, ...]]:
    plans = depart(wish(after, unit, **more), was, standing(was, **(before or {})))
    return [steps for steps in plans if steps]


def test_a_region_gets_nothing_new_and_ends_what_it_has_before_it_stops() -> None:
    plans = departures(THREE, TWO, "asia")
    assert plans == [
        (Rest(Kind.REGION, "asia", True, leaving=True), Empty("asia")),
        (Reread("eu"),),
        (Reread("us"),),
        (Beside("ams"),),
        (Beside("nyc"),),
        (Idle(Kind.REGION, "asia"),),
        tuple(Stop(name) for name in (*NODES, *DOORS)),
    ]
    assert names_in(plans[-1]) == {*NODES, *DOORS}


def test_the_way_back_is_the_region_as_it_was() -> None:
    before = standing(THREE)
    plans = departures(THREE, TWO, "asia")
    back = (*reversed(DOORS), *reversed(NODES))
    assert way_back(plans[-1], before) == (*(Start(name) for name in back), Ready(back))
    assert way_back(plans[-2], before) == ()
    assert way_back(plans[0], before) == (Rest(Kind.REGION, "asia", False),)
    drained = standing(THREE, resting=frozenset({"asia"}))
    assert way_back(plans[0], drained) == (Rest(Kind.REGION, "asia", True),), "not leaving any more"


def test_an_edge_leaves_after_all_that_may_fail() -> None:
    after = replace(TWO, edges=TWO.edges[:1])
    assert departures(TWO, after, "nyc") == [(Leave("nyc"),)]
    assert names_in([Leave("nyc")]) == {"nyc"}
    both = replace(topology(TWO.regions[0]), edges=TWO.edges[:1])
    for unit in ("nyc", "us"):
        steps = [step for plan in departures(TWO, both, unit) for step in plan]
        assert steps[-1] == Leave("nyc")
        assert Stop("us") in steps
        assert Beside("nyc") not in steps


def test_who_has_the_timers_next_is_started_anew() -> None:
    edges = tuple(replace(edge, admin=f"127.0.0.1:{n}") for n, edge in enumerate(TWO.edges, 71))
    was = replace(TWO, edges=edges)
    assert departures(was, replace(was, edges=edges[1:]), "ams") == [
        (Beside("nyc"),), (Leave("ams"),),
    ]  # fmt: skip
    assert departures(was, replace(was, edges=edges[:1]), "nyc") == [(Leave("nyc"),)]


def test_a_region_that_does_not_answer_is_not_waited_for() -> None:
    before = {"serving": frozenset({"eu", "us"}), "silent": frozenset({"asia"})}
    steps = [step for plan in departures(THREE, TWO, "asia", before) for step in plan]
    assert not any(isinstance(step, Rest | Empty | Idle) for step in steps)
    assert Stop("asia") in steps


def test_what_never_ran_is_not_stopped() -> None:
    more = Node(name="asia-more", role=Role.COMBINED, model="m")
    known = topology(*TWO.regions, replace(ASIA, nodes=(*ASIA.nodes, more)))
    plans = depart(wish(TWO, "asia"), known, standing(THREE))
    assert plans[-1] == tuple(Stop(name) for name in (*NODES, *DOORS))


@pytest.mark.parametrize(
    ("unit", "more", "words"),
    [
        ("eu", {}, "not in this topology any more: .* `skerry deploy asia --topology FILE` first"),
        ("asia", {"canary": 5}, "--canary are for what is to run"),
        ("asia", {"release": HERE}, "'asia' is to go"),
        ("asia", {"again": True}, "'asia' is to go"),
    ],
)
def test_what_cannot_be_wished(unit: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        departures(THREE, TWO, unit, **more)


def test_a_region_that_callers_need_stays() -> None:
    with pytest.raises(ConfigError, match="region asia cannot go now: no other region that every"):
        departures(THREE, TWO, "asia", {"serving": frozenset({"asia"})})
    tied = replace(THREE, tenants={"t": Tenant(regions=("asia", "us"))})
    free = replace(TWO, tenants={"t": Tenant(regions=("us",))})
    assert departures(tied, free, "asia")
    with pytest.raises(ConfigError, match="whose residency names it"):
        departures(tied, free, "asia", {"serving": frozenset({"asia", "eu"})})


def test_an_edge_that_does_not_answer_makes_no_region_useless() -> None:
    nobody_knows: dict[str, Any] = {"serving": frozenset()}
    with pytest.raises(ConfigError, match="region asia cannot go now"):
        departures(THREE, TWO, "asia", nobody_knows)
    for known in ("silent", "resting"):
        assert departures(THREE, TWO, "asia", {**nobody_knows, known: frozenset({"asia"})})


def test_nodes_that_go_with_it_in_other_regions_are_seen_off() -> None:
    eu, us = TWO.regions
    more = replace(eu, nodes=(*eu.nodes, Node(name="eu-more", role=Role.COMBINED, model="m")))
    plans = departures(topology(more, us, ASIA), TWO, "asia")
    gone = (Rest(Kind.NODE, "eu-more", True), Idle(Kind.NODE, "eu-more"), Stop("eu-more"))
    assert (Reread("eu"), *gone) in plans


def test_a_region_that_nobody_hears_or_whose_model_goes_too_may_go() -> None:
    assert departures(THREE, TWO, "asia", {"serving": frozenset({"eu"})})
    was = topology(*TWO.regions, ALONE)
    with pytest.raises(ConfigError, match=r"all that it gets \(other,"):
        departures(was, TWO, "asia")
    after = replace(TWO, models={"m": Model(source="x")})
    assert departures(was, after, "asia")


def test_leavers_are_those_that_are_missing() -> None:
    sfo = Edge(name="sfo", listen="127.0.0.1:5")
    was = replace(THREE, edges=(*THREE.edges, sfo))
    assert leavers(was, TWO) == ([ASIA], [sfo])
    assert leavers(TWO, was) == ([], [])
