"""Models that share a place, as their router sees them: who waits for what, and what it tells."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from core.config import parse
from core.metrics import RouterMetrics, render
from core.status import Wanted
from core.types import ModelName, NodeName, Role
from regional.cluster import Cluster
from regional.demand import Demand
from regional.dispatch import Dispatcher
from regional.kv_index import KvIndex
from regional.pb import node_pb2 as pb
from regional.places import TURN_SHARE
from regional.rpc import NodeSession
from regional.scaling import ASSUMED_START_S, SETTLE_S, TURNED_AWAY_S, Scaling
from regional.status import absent, node_status

TURN_S = 8.0
TEXT = f"""
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
turn_s = {TURN_S}
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
REGION = parse(TEXT).region("here")
ONE, TWO = ModelName("one"), ModelName("two")


class Desk:
    """A router's parts with a clock of the test's own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.changes = 0
        self.registry = CollectorRegistry()
        self.cluster = Cluster(REGION, heartbeat_s=1.0, clock=lambda: self.now)
        self.demand = Demand(lambda: self.now)
        dispatcher = Dispatcher(
            self.cluster, KvIndex(), limit=9, split_min_tokens=64, changed=lambda: None,
            clock=lambda: self.now,
        )  # fmt: skip
        self.scaling = Scaling(
            REGION, cluster=self.cluster, dispatcher=dispatcher, demand=self.demand,
            metrics=RouterMetrics(self.registry), changed=self._changed, clock=lambda: self.now,
        )  # fmt: skip
        self.now += SETTLE_S

    def _changed(self) -> None:
        self.changes += 1

    def join(self, name: str, model: str) -> NodeSession:
        offer = pb.ModelOffer(name=model, fingerprint=b"f", context=4096, blocks=1024,
                              decode_tokens_per_s=50.0)  # fmt: skip
        join = pb.Join(name=name, role=Role.COMBINED, max_sequences=4, models=[offer])
        session = NodeSession(join, 1)
        self.cluster.join(session)
        return session

    def told(self) -> dict[str, Wanted]:
        self.scaling.look()
        return {one.model: one for one in self.scaling.wanted}


def test_a_place_that_others_have_is_told_and_counted_as_wait() -> None:
    desk = Desk()
    assert not desk.told()["two"].no_place
    session = desk.join("a", "one")
    assert desk.told()["two"].no_place
    assert not desk.told()["one"].no_place
    assert desk.scaling.start_s(TWO) == ASSUMED_START_S, "an idle one gives way at once"
    member = desk.cluster.find(NodeName("a"))
    assert member is not None
    charge = member.pools[0].charge(answer_tokens=100)
    assert desk.scaling.start_s(TWO) == ASSUMED_START_S + 100 / 50.0 + TURN_S * TURN_SHARE
    charge.release()
    desk.cluster.leaving(session)
    assert desk.told()["one"].no_place, "its own one leaves"
    desk.cluster.remove(session)
    assert desk.scaling.start_s(TWO) == ASSUMED_START_S


def test_waiting_for_a_place_is_no_part_of_a_start() -> None:
    desk = Desk()
    held = desk.join("a", "one")
    desk.scaling.cold(TWO)
    assert desk.told()["two"].nodes == 1
    desk.now += 40.0
    desk.told()
    desk.cluster.remove(held)
    desk.told()
    desk.now += 3.0
    desk.join("b", "two")
    desk.told()
    desk.now += 1.0
    assert desk.scaling.start_s(TWO) == 3.0


def test_nodes_in_a_pool_tell_what_they_have_and_are_off_when_they_are_not_there() -> None:
    desk = Desk()
    desk.told()
    session = desk.join("a", "one")
    member = desk.cluster.find(NodeName("a"))
    assert member is not None
    desk.now += 2.0
    status = node_status(member, "gpu")
    assert (status.pool, status.placed, status.idle_s) == ("gpu", 0, 2.0)
    reading = member.pools[0].charge(prefill_tokens=10, answer_tokens=10, choices=2)
    assert (node_status(member, "gpu").placed, node_status(member, "gpu").idle_s) == (2, 0.0)
    assert node_status(member).placed == 0, "of others nobody asks that"
    reading.release()
    desk.now += 1.5
    assert node_status(member, "gpu").idle_s == 1.5
    desk.cluster.heard(session, pb.Heartbeat(others=[pb.PoolWork(sequences=3)]))
    assert (node_status(member, "gpu").placed, node_status(member, "gpu").idle_s) == (3, 0.0)

    desk.demand.came(TWO)
    desk.scaling.cold(TWO)
    assert desk.told()["two"].nodes == 1
    gone = list(absent(desk.cluster.members(), REGION.nodes, desk.scaling.running))
    assert [(one.name, one.off, one.pool) for one in gone] == [("b", True, "gpu")]


def test_who_would_not_wait_counts_for_a_moment() -> None:
    desk = Desk()
    desk.scaling.cold(TWO)
    assert desk.told()["two"].waiting == 1
    desk.now += TURNED_AWAY_S
    assert desk.told()["two"].waiting == 0


def test_what_moves_all_the_time_is_no_news() -> None:
    desk = Desk()
    desk.demand.came(TWO)
    desk.told()
    before = desk.changes
    desk.demand.went(TWO)
    desk.now += 3.0
    assert not desk.told()["two"].in_use
    assert desk.changes == before
    desk.join("a", "one")
    desk.told()
    assert desk.changes == before + 1


@pytest.mark.parametrize("again", [False, True])
def test_another_topology_is_taken(again: bool) -> None:
    desk = Desk()
    desk.scaling.cold(TWO)
    assert desk.told().keys() == {"one", "two"}
    head, _, _ = TEXT.partition('[[regions.nodes]]\nname = "b"')
    fewer = head.replace("[regions.scale.two]\nleast = 0\n", "")
    desk.scaling.take(parse(fewer).region("here"))
    assert desk.told().keys() == {"one"}
    assert desk.scaling.start_s(TWO) is None
    assert 'model="two"' not in render(desk.registry).decode()
    if again:
        desk.scaling.take(REGION)
        assert desk.told()["two"].nodes == 0
