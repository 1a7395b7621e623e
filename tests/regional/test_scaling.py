"""A cold model: who waits for it, what is wanted for it, and when it is thought to be up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from core.config import parse
from core.errors import NoCapacity
from core.metrics import RouterMetrics, render
from core.types import ModelName, Role, Timings
from regional.cluster import Cluster
from regional.demand import Demand
from regional.dispatch import Dispatcher, Placed
from regional.kv_index import KvIndex
from regional.pb import node_pb2 as pb
from regional.placement import Ask
from regional.reading import Reading
from regional.rpc import NodeSession
from regional.scaling import ASSUMED_START_S, LEAST_START_S, SETTLE_S, Scaling
from regional.status import absent, model_statuses
from tests.regional.fakes import ask, run

MODEL = ModelName("m")
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
idle_s = 60
queue_s = 2
[[regions.nodes]]
name = "p1"
role = "prefill"
model = "m"
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


class Desk:
    """A region of which no node is up, and its clock."""

    def __init__(self, limit: int = 2) -> None:
        self.now = 100.0
        self.changes = 0
        self.registry = CollectorRegistry()
        self.cluster = Cluster(REGION, heartbeat_s=1.0, clock=lambda: self.now)
        self.demand = Demand(lambda: self.now)
        self.dispatcher = Dispatcher(
            self.cluster, KvIndex(), limit=limit, split_min_tokens=64,
            changed=lambda: None, cold=lambda model: self.scaling.cold(model),
        )  # fmt: skip
        self.scaling = Scaling(
            REGION, cluster=self.cluster, dispatcher=self.dispatcher, demand=self.demand,
            metrics=RouterMetrics(self.registry), changed=self._changed, clock=lambda: self.now,
        )  # fmt: skip
        self._ages = 0

    def _changed(self) -> None:
        self.changes += 1

    async def want(self, tokens: int = 40, *, wait: bool = True) -> asyncio.Task[Placed]:
        self._ages += 1
        wanted = Ask(model=MODEL, prompt_tokens=tokens, max_tokens=4)
        reading = Reading(ask(), list(range(tokens)))
        task = asyncio.create_task(
            self.dispatcher.place(wanted, reading, age=self._ages, priority=0, wait=wait)
        )
        await asyncio.sleep(0)
        return task

    def join(self, name: str, role: Role, serial: int) -> NodeSession:
        offer = pb.ModelOffer(name=MODEL, fingerprint=b"f", context=4096, blocks=1024)
        session = NodeSession(
            pb.Join(name=name, role=role, max_sequences=1, max_step_tokens=512, models=[offer]),
            serial,
        )
        self.cluster.join(session)
        self.dispatcher.poke()
        return session

    def look(self) -> dict[str, tuple[int, str]]:
        self.scaling.look()
        return {one.role: (one.nodes, one.why) for one in self.scaling.wanted}


@asynccontextmanager
async def waiting(desk: Desk) -> AsyncIterator[asyncio.Task[Placed]]:
    task = await desk.want()
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


def test_a_request_for_a_cold_model_waits_until_its_node_is_up() -> None:
    async def test() -> None:
        desk = Desk()
        desk.now += SETTLE_S
        assert desk.look() == {"prefill": (0, "first_look"), "decode": (0, "first_look")}
        desk.demand.came(MODEL)
        task = await desk.want()
        assert not task.done()
        assert desk.look() == {"prefill": (1, "asked"), "decode": (1, "asked")}
        assert desk.changes == 2
        page = render(desk.registry).decode()
        assert 'skerry_router_wanted_nodes{model="m",role="decode"} 1.0' in page

        desk.join("d1", Role.DECODE, 1)
        placed = await task
        assert placed.placement.decode.node == "d1"
        placed.release()

    run(test())


def test_who_comes_before_the_first_look_does_not_wait_for_it() -> None:
    async def test() -> None:
        desk = Desk()
        assert desk.look() == {}
        async with waiting(desk):
            assert desk.look()["decode"] == (1, "asked")

    run(test())


def test_the_queue_of_a_cold_model_is_bounded() -> None:
    async def test() -> None:
        desk = Desk(limit=1)
        async with waiting(desk):
            with pytest.raises(NoCapacity) as refused:
                await (await desk.want())
            assert refused.value.retry_after_s is not None
            assert refused.value.retry_after_s < 10.0

    run(test())


def test_who_may_not_wait_starts_a_node_all_the_same() -> None:
    async def test() -> None:
        desk = Desk()
        desk.now += SETTLE_S
        with pytest.raises(NoCapacity):
            await (await desk.want(wait=False))
        assert desk.look()["decode"] == (1, "asked")

    run(test())


def test_a_start_is_measured_and_foretold() -> None:
    async def test() -> None:
        desk = Desk()
        desk.now += SETTLE_S
        desk.look()
        assert desk.scaling.start_s(MODEL) == ASSUMED_START_S
        async with waiting(desk) as task:
            desk.look()
            desk.now += 2.0
            assert desk.scaling.start_s(MODEL) == ASSUMED_START_S - 2.0
            desk.now += 5.0
            assert desk.scaling.start_s(MODEL) == LEAST_START_S
            session = desk.join("d1", Role.DECODE, 1)
            desk.look()
            (await task).release()
        desk.cluster.remove(session)
        desk.now += 61.0
        assert desk.look()["decode"] == (0, "idle")
        assert desk.scaling.start_s(MODEL) == 7.0
        assert desk.scaling.start_s(ModelName("other")) is None

    run(test())


def test_idle_time_runs_from_the_last_end() -> None:
    async def test() -> None:
        desk = Desk()
        desk.demand.came(MODEL)
        async with waiting(desk) as task:
            desk.look()
            desk.join("d1", Role.DECODE, 1)
            (await task).release()
        desk.now += 500.0
        assert desk.look()["decode"] == (1, "asked"), "its answer is long"
        desk.demand.went(MODEL)
        desk.now += 59.0
        assert desk.look()["decode"] == (1, "asked")
        desk.now += 1.0
        assert desk.look()["decode"] == (0, "idle")

    run(test())


def test_full_slots_bring_a_second_node() -> None:
    async def test() -> None:
        desk = Desk(limit=20)
        desk.join("d1", Role.DECODE, 1)
        placed = await (await desk.want())
        desk.now += SETTLE_S
        # One slot, 1,000 tokens a second unmeasured: a typical answer is 0.256 s.
        assert desk.look()["decode"] == (1, "first_look")
        tasks = [await desk.want() for _ in range(2)]
        assert desk.look()["decode"] == (1, "first_look")
        tasks += [await desk.want() for _ in range(6)]
        assert desk.look()["decode"] == (2, "queue")
        placed.release()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    run(test())


def test_what_the_status_says_of_it() -> None:
    desk = Desk()
    view = desk.cluster.view()
    (cold,) = model_statuses(view, [MODEL], lambda _: 4096, desk.scaling.start_s)
    assert (cold.start_s, cold.context) == (ASSUMED_START_S, 4096)
    nodes = absent(desk.cluster.members(), REGION.nodes, desk.scaling.running)
    assert {node.name for node in nodes if node.off} == {"p1", "d1", "d2"}

    desk.cluster.resting = frozenset({"d1", "d2"})
    view = desk.cluster.view()
    told = model_statuses(view, [MODEL], lambda _: 4096, desk.scaling.start_s)
    assert told == (), "all that could be started rests by order"

    desk.cluster.resting = frozenset()
    desk.join("d1", Role.DECODE, 1)
    (warm,) = model_statuses(desk.cluster.view(), [MODEL], lambda _: 4096, desk.scaling.start_s)
    assert warm.start_s == 0.0
    assert model_statuses(view, [MODEL], lambda _: 4096) == ()


def test_first_tokens_of_late_are_remembered() -> None:
    now = 0.0
    demand = Demand(lambda: now)
    assert demand.first_token_s(MODEL) == 0.0
    demand.answered(MODEL, Timings(queue_s=1.0, prefill_s=2.0))
    demand.answered(MODEL, Timings(prefill_s=1.0))
    assert demand.first_token_s(MODEL) == 2.0
    now = 31.0
    assert demand.first_token_s(MODEL) == 0.0
