"""A region of several routers of which one does not answer leaves all the same, and it is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from core.batches import QUEUE_PATH, QueueLeft
from core.config import World
from core.errors import ConfigError
from core.orders import ORDERS_PATH, OrderAsk, Orders
from deploy.rollout import attending
from deploy.rollout.asking import Asking
from deploy.rollout.attending import Attending, Patience
from deploy.rollout.back import way_back
from deploy.rollout.departures import depart
from deploy.rollout.plan import plan
from deploy.rollout.steps import (
    Empty,
    Idle,
    Kind,
    Ready,
    Replace,
    Reread,
    Rest,
    Step,
    Stop,
)
from tests.deploy.rollout.test_plan import SPLIT, TWO, region, standing, topology, wish

FIRST, SECOND = 1, 12
"""The ports of asia's two routers."""
ASIA = region("asia", *SPLIT, routers=2)
ASIA = replace(ASIA, routers=(replace(ASIA.routers[0], http=f"127.0.0.1:{SECOND}"),))
THREE = topology(*TWO.regions, ASIA)
DEAD = frozenset({"asia.2"})
LEAVING = Rest(Kind.REGION, "asia", True, leaving=True, but=("asia.2",))
STEPS: tuple[Step, ...] = (
    LEAVING, Empty("asia", but=("asia.2",)), Idle(Kind.REGION, "asia", but=("asia.2",)),
)  # fmt: skip


def test_it_is_left_out_and_named_and_stopped_with_the_others() -> None:
    plans = depart(wish(TWO, "asia"), THREE, standing(THREE, mute=DEAD))
    steps = [step for plan in plans for step in plan]
    assert [step for step in steps if isinstance(step, Rest | Empty | Idle)] == list(STEPS)
    assert Stop("asia.2") in steps
    assert str(LEAVING) == (
        "drain region asia (router asia.2 does not answer and is left out: what is queued there "
        "stays)"
    )


def test_a_region_is_replaced_without_it_and_it_first() -> None:
    """A router that hangs, or that ends at every start, is what a rollout is to mend."""
    but = ("asia.2",)
    again = wish(THREE, "asia", again=True)
    alone = topology(ASIA)
    steps = plan(wish(alone, "asia", again=True), standing(alone, mute=DEAD))
    assert steps[:2] == (Replace(("asia.2",)), Ready(("asia.2",), but))
    assert not [step for step in steps if isinstance(step, Rest) and step.name == "asia.2"]
    for planned in (steps, plan(again, standing(THREE, mute=DEAD))):
        waits = [step for step in planned if isinstance(step, Rest | Idle | Ready)]
        assert waits
        assert {step.but for step in waits} == {but}
        assert {step.but for step in way_back(planned, standing(THREE, mute=DEAD))
                if isinstance(step, Rest | Idle | Ready)} == {but}  # fmt: skip


def test_a_region_that_does_not_answer_at_all_is_replaced() -> None:
    both = ("asia", "asia.2")
    silent = standing(THREE, silent=frozenset({"asia"}))
    steps = plan(wish(THREE, "asia", again=True), silent)
    assert Rest(Kind.REGION, "asia", True, but=both) in steps


def test_it_reads_a_change_when_it_starts(told: Told, tmp_path: Path) -> None:
    asia = replace(ASIA, split_min_tokens=7)
    steps = plan(wish(topology(*TWO.regions, asia), "asia"), standing(THREE, mute=DEAD))
    assert steps == (Reread("asia"), Reread("asia.2", mute=True))
    asking, _ = told(Routers(SECOND))
    asking.tell("asia.2", tmp_path / "topology-2.toml", mute=True)
    with pytest.raises(ConfigError, match=r"router asia\.2 does not answer"):
        asking.tell("asia.2", tmp_path / "topology-2.toml")


def test_nor_does_the_way_back_want_it() -> None:
    back = Rest(Kind.REGION, "asia", False, but=("asia.2",))
    assert way_back([LEAVING], standing(THREE, mute=DEAD)) == (back,)


class Routers:
    """Of asia; who is `dead` does not answer. `asked`: by port, what was ordered."""

    def __init__(self, *dead: int) -> None:
        self.dead = dead
        self.ordered: list[tuple[int | None, OrderAsk]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        port, path = request.url.port, request.url.path
        if port in self.dead:
            raise httpx.ConnectError("refused")
        if path == QUEUE_PATH:
            return httpx.Response(200, content=msgspec.json.encode(QueueLeft()))
        if path == ORDERS_PATH and request.method == "GET":
            return httpx.Response(200, content=msgspec.json.encode(Orders(weight=port or 0)))
        if path == ORDERS_PATH:
            self.ordered.append((port, msgspec.json.decode(request.content, type=OrderAsk)))
            return httpx.Response(200, content=msgspec.json.encode(Orders()))
        if path == "/metrics":
            return httpx.Response(404)
        return httpx.Response(200, json={"active": 0})


Told = Callable[[Routers], tuple[Asking, Attending]]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setattr(attending, "HEARD_S", 0.0)
    clients: list[httpx.Client] = []

    def of(routers: Routers) -> tuple[Asking, Attending]:
        client = httpx.Client(transport=httpx.MockTransport(routers))
        clients.append(client)
        world = World(THREE, tmp_path / "topology.toml", tmp_path)
        asking = Asking(client, world, lambda _: False)
        return asking, Attending(
            client=client, world=world, asking=asking, patience=Patience(idle_s=0.0),
            pause=lambda _: False, say=lambda _: None,
        )  # fmt: skip

    yield of
    for client in clients:
        client.close()


def test_who_does_not_answer_is_found(told: Told) -> None:
    asking, _ = told(Routers(SECOND))
    assert asking.mute("asia") == ["asia.2"]
    asking, _ = told(Routers(FIRST, SECOND))
    assert asking.mute("asia") == ["asia", "asia.2"]


@pytest.mark.parametrize(("dead", "weight"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_the_regions_orders_are_those_of_one_that_answers(
    told: Told, dead: int, weight: int
) -> None:
    asking, _ = told(Routers(dead))
    assert asking.orders("asia").weight == weight


def test_the_steps_are_taken_without_it(told: Told) -> None:
    routers = Routers(SECOND)
    _, stage = told(routers)
    for step in STEPS:
        assert isinstance(step, Rest | Empty | Idle)
        stage.take(step)
    assert routers.ordered == [(FIRST, OrderAsk(resting=True, leaving=True))]


def test_one_that_answers_again_is_told_as_well(told: Told) -> None:
    routers = Routers()
    _, stage = told(routers)
    stage.take(LEAVING)
    assert [port for port, _ in routers.ordered] == [FIRST, SECOND]


def test_one_that_was_there_and_is_lost_meanwhile_is_a_failure(told: Told) -> None:
    _, stage = told(Routers(FIRST))
    for step in STEPS:
        assert isinstance(step, Rest | Empty | Idle)
        with pytest.raises(ConfigError, match=r"asia is not reached|router asia does not"):
            stage.take(step)
