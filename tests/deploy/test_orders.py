"""Who takes an order for a name, also one that the newest topology does not have."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from core.config import Router, World
from core.errors import ConfigError
from core.orders import ORDERS_PATH, OrderAsk, Orders
from core.status import NodeStatus
from core.types import ModelName, NodeName
from deploy.orders import drain, give_by, part_of, wait_until_idle, weigh
from deploy.ready import RouterView
from tests.deploy.rollout.test_plan import TWO

NODES = {1: ["eu-write", "eu-older"], 11: ["us-read", "us-write"]}
"""By the port of its router: what runs in a region, as the router has it."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    """eu was given a node before the newest topology came, which has no such node."""
    eu, us = TWO.regions
    topology = replace(TWO, regions=(eu, replace(us, http="127.0.0.1:11")))
    return World(topology, tmp_path / "topology-2.toml", tmp_path)


def test_a_router_that_is_down_is_waited_for_and_keeps_the_order_from_nobody_else(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two dies and is started again by its supervisor; one that stays away is named."""
    eu = replace(world.topology.regions[0], routers=(Router(http="127.0.0.1:2", grpc="x:3"),))
    there = World(replace(world.topology, regions=(eu,)), world.path, world.state)
    (world.state / "region.secret").write_text("s" * 32)
    taken: list[int | None] = []
    refused = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal refused
        if request.url.port == 1 and refused > 0:
            refused -= 1
            raise httpx.ConnectError("refused")
        taken.append(request.url.port)
        return httpx.Response(200, content=msgspec.json.encode(Orders()))

    def given() -> list[int | None]:
        taken.clear()
        with httpx.Client(transport=httpx.MockTransport(answer)) as http:
            give_by(http, there, part_of(there.topology, "eu"), OrderAsk(resting=True), wait_s=0.01)
        return taken

    monkeypatch.setattr("deploy.orders.POLL_S", 0.0)
    refused = 1
    assert given() == [2, 1]
    refused = 1 << 60
    with pytest.raises(ConfigError, match=r"region eu is not reached at http://127\.0\.0\.1:1 "
                       r"\(refused\); its other routers have the order"):  # fmt: skip
        given()
    assert taken == [2]


def test_whoever_waits_for_the_end_of_work_bears_a_router_that_is_started_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    says: list[object] = [2, "refused", "refused", 1, 0]

    def answer(request: httpx.Request) -> httpx.Response:
        if isinstance(now := says.pop(0), str):
            raise httpx.ConnectError(now)
        return httpx.Response(200, json={"active": now})

    monkeypatch.setattr("deploy.orders.POLL_S", 0.0)
    monkeypatch.setattr(
        "deploy.orders.client",
        lambda *_, **__: httpx.Client(transport=httpx.MockTransport(answer)),
    )
    said: list[str] = []
    part = part_of(world.topology, "eu")
    wait_until_idle(world, part, say=said.append, wait_s=60)
    assert said == ["  2 under way", "  1 under way", "  region eu is idle"]
    monkeypatch.setattr("deploy.orders.AGAIN_S", 0.0)
    says[:] = ["refused"]
    with pytest.raises(ConfigError, match="eu is not reached"):
        wait_until_idle(world, part, say=said.append, wait_s=60)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, OrderAsk]]:
    taken: list[tuple[int | None, OrderAsk]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == ORDERS_PATH:
            taken.append((request.url.port, msgspec.json.decode(request.content, type=OrderAsk)))
            return httpx.Response(200, content=msgspec.json.encode(Orders()))
        names = NODES[request.url.port or 0]
        nodes = tuple(
            NodeStatus(name=NodeName(name), role="combined", model=ModelName("m")) for name in names
        )
        return httpx.Response(200, content=msgspec.json.encode(RouterView(nodes=nodes)))

    monkeypatch.setattr(
        "deploy.orders.client",
        lambda *_, **__: httpx.Client(transport=httpx.MockTransport(answer)),
    )
    return taken


@pytest.mark.parametrize("resting", [True, False])
def test_a_node_that_only_its_region_still_has_takes_orders(
    world: World, given: list[tuple[int | None, OrderAsk]], resting: bool
) -> None:
    said: list[str] = []
    drain(world, "eu-older", resting=resting, say=said.append, wait_s=0)
    assert given == [(1, OrderAsk(nodes={"eu-older": resting}))]
    assert said[0].startswith("node eu-older")


def test_its_weight_is_refused_as_that_of_any_node(
    world: World, given: list[tuple[int | None, OrderAsk]]
) -> None:
    with pytest.raises(ConfigError, match="'eu-older' is a node; only regions have a weight"):
        weigh(world, "eu-older", 3, say=print)
    assert given == []


def test_a_name_that_nobody_has_is_told_what_is_known(
    world: World, given: list[tuple[int | None, OrderAsk]]
) -> None:
    with pytest.raises(ConfigError, match=r"nothing is named 'eu-oldr'; did you mean 'eu-older'\?"):
        drain(world, "eu-oldr", resting=True, say=print, wait_s=0)
    with pytest.raises(ConfigError, match=r"there are: ams, .*us-write.*, eu-older$"):
        drain(world, "x", resting=True, say=print, wait_s=0)
    assert given == []
