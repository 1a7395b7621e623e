"""The view of a node: measured rates, others' work beside one's own, and a start that is slow."""

from __future__ import annotations

from core.config import parse
from core.types import ModelName, NodeName, PoolId
from regional.cluster import (
    SLOW_START_S,
    UNMEASURED_KV_BYTES_PER_S,
    UNMEASURED_TIER_BYTES_PER_S,
    Cluster,
    Member,
)
from regional.dispatch import Dispatcher, Placed
from regional.kv_index import KvIndex
from regional.pb import node_pb2 as pb
from regional.placement import Ask
from regional.reading import Reading
from regional.rpc import NodeSession
from tests.regional.fake_node import MODEL
from tests.regional.fakes import ask, run, topology

REGION = parse(topology([("p1", "prefill"), ("d1", "decode"), ("d2", "decode")])).region("here")
HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def session(
    name: str, role: str, serial: int, *, age_s: float = HOUR, pools: int = 1
) -> NodeSession:
    offer = pb.ModelOffer(
        name=MODEL, fingerprint=b"same", context=4096, blocks=1024, kv_bytes_per_token=100
    )
    join = pb.Join(
        name=name,
        role=role,
        max_sequences=32,
        max_step_tokens=512,
        models=[offer],
        pools=pools,
        age_s=age_s,
    )
    return NodeSession(join, serial)


def member(cluster: Cluster, name: str) -> Member:
    found = cluster.find(NodeName(name))
    assert found is not None
    return found


def test_what_other_routers_sent_counts_beside_ones_own_and_changes_with_each_beat() -> None:
    cluster = Cluster(REGION, heartbeat_s=1.0)
    joined = session("d1", "decode", 1, pools=2)
    cluster.join(joined)
    own = member(cluster, "d1").pools[1].charge(prefill_tokens=100, answer_tokens=10)
    others = [
        pb.PoolWork(),
        pb.PoolWork(prefills=2, prefill_tokens=500, sequences=3, answer_tokens=40),
    ]
    cluster.heard(joined, pb.Heartbeat(others=others))
    idle, busy = cluster.view().nodes
    assert (idle.prefills, idle.prefill_tokens, idle.sequences) == (0, 0, 0)
    assert (busy.prefills, busy.prefill_tokens, busy.sequences) == (3, 600, 4)
    assert busy.answer_tokens == 50
    own.release()
    own.release()
    assert cluster.view().nodes[1].sequences == 3
    cluster.heard(joined, pb.Heartbeat())
    assert cluster.view().nodes[1].sequences == 0


def test_rates_are_the_measured_ones_once_there_are_any() -> None:
    cluster = Cluster(REGION, heartbeat_s=1.0)
    joined = session("p1", "prefill", 1)
    cluster.join(joined)
    [before] = cluster.view().nodes
    assert before.kv_bytes_per_s == UNMEASURED_KV_BYTES_PER_S
    assert before.tier_bytes_per_s == UNMEASURED_TIER_BYTES_PER_S
    assert before.offers[0].block_bytes == 1600
    cluster.heard(
        joined,
        pb.Heartbeat(kv_bytes_per_s=2e9, tier_bytes_per_s=3e8, prefill_tokens_per_s=700.0),
    )
    [after] = cluster.view().nodes
    assert (after.kv_bytes_per_s, after.tier_bytes_per_s) == (2e9, 3e8)
    assert after.prefill_tokens_per_s == 700.0


def test_a_node_over_several_hosts_is_not_asked_for_its_blocks() -> None:
    cluster = Cluster(REGION, heartbeat_s=1.0)
    joined = session("d1", "decode", 1)
    cluster.join(joined)
    assert [view.sends for view in cluster.view().nodes] == [True]
    joined.join.scattered = True
    assert [view.sends for view in cluster.view().nodes] == [False]


def test_a_node_that_joins_another_router_is_not_fresh_there() -> None:
    clock = Clock()
    cluster = Cluster(REGION, heartbeat_s=1.0, clock=clock)
    cluster.join(session("d1", "decode", 1))
    cluster.join(session("d2", "decode", 2, age_s=SLOW_START_S))
    assert [one.share for one in cluster.view().nodes] == [1.0, 1.0]


def test_a_fresh_node_draws_a_growing_share_and_no_herd() -> None:
    """Empty as it is, it would else get all that comes until it is as full as the others."""

    async def test() -> None:
        clock = Clock()
        cluster = Cluster(REGION, heartbeat_s=1.0, clock=clock)
        cluster.join(session("d1", "decode", 1))
        dispatcher = Dispatcher(
            cluster, KvIndex(), limit=64, split_min_tokens=4096, changed=lambda: None
        )

        async def place(number: int) -> Placed:
            wanted = Ask(model=ModelName(MODEL), prompt_tokens=20, max_tokens=64)
            reading = Reading(ask(), list(range(20)))
            placed = await dispatcher.place(wanted, reading, age=number, priority=0)
            for seat in (placed.prefill, placed.decode):
                if seat is not None:
                    seat.charge.prompt_read()
            return placed

        ages = iter(range(1000))
        running = [await place(next(ages)) for _ in range(12)]
        cluster.join(session("d2", "decode", 2, age_s=0.0))
        fresh = PoolId(NodeName("d2"), 0)
        shares = []
        for _ in range(4):
            now = [await place(next(ages)) for _ in range(8)]
            shares.append(sum(one.placement.decode == fresh for one in now))
            for one in now:
                one.release()
            clock.now += SLOW_START_S / 3
        assert 0 < shares[0] < 4
        assert shares == sorted(shares)
        assert shares[-1] == 8  # grown up, and less busy than the other
        for one in running:
            one.release()
        assert all(node.sequences == 0 for node in cluster.view().nodes)

    run(test())


def test_a_draining_node_gets_nothing_and_one_that_left_is_gone() -> None:
    cluster = Cluster(REGION, heartbeat_s=1.0)
    first, second = session("d1", "decode", 1), session("d2", "decode", 2)
    cluster.join(first)
    cluster.join(second)
    cluster.heard(first, pb.Heartbeat(draining=True))
    assert [one.name for one in cluster.view().decoders()] == ["d2"]
    cluster.heard(first, pb.Heartbeat())
    cluster.leaving(first)
    assert [one.name for one in cluster.view().decoders()] == ["d2"]
    assert cluster.remove(first)
    assert not cluster.remove(first)
    assert [one.name for one in cluster.view().nodes] == ["d2"]
    assert not cluster.heard(first)
