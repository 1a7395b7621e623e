"""Who is asked about a part of a running world, and how long an answer may take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from core.config import World
from core.errors import ConfigError
from core.orders import ORDERS_PATH
from deploy.rollout.asking import Asking
from deploy.rollout.steps import Kind
from tests.deploy.rollout.test_plan import TWO


def test_a_node_that_only_its_region_still_has_is_found(tmp_path: Path) -> None:
    """An edge was given a topology without it, and the region runs from the one before."""
    eu, us = TWO.regions
    less = replace(TWO, regions=(replace(eu, nodes=eu.nodes[1:]), us))
    world = World(less, tmp_path / "topology-2.toml", tmp_path)
    gone = eu.nodes[0].name
    with httpx.Client() as client:
        found = Asking(client, world, lambda _: False, ran=[less, TWO]).doors(Kind.NODE, gone)
        with pytest.raises(ConfigError, match=f"no node is named '{gone}'"):
            Asking(client, world, lambda _: False).doors(Kind.NODE, gone)
    assert found == {"eu": "http://127.0.0.1:1"}


class Slow:
    """Routers and edges that take five seconds for an answer. Region eu is suspect, then heard."""

    suspect = 3

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.extensions["timeout"]["read"] < 5:
            raise httpx.ReadTimeout("slow")
        if request.url.path == ORDERS_PATH:
            return httpx.Response(200, json={"resting": True, "weight": 7})
        state = "suspect" if self.suspect > 0 else "fresh"
        self.suspect -= 1
        status = {
            "kind": "status", "region": "eu", "epoch": "1", "sequence": 1,
            "models": [{"name": "m", "context": 9}],
        }  # fmt: skip
        regions = [{"name": "eu", "state": state, "status": status}]
        return httpx.Response(200, json={"regions": regions})


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Asking]:
    world = World(TWO, tmp_path / "topology.toml", tmp_path)
    with httpx.Client(transport=httpx.MockTransport(Slow())) as client:
        yield Asking(client, world, lambda _: False)


def test_a_region_that_is_slow_is_not_silent_and_keeps_its_orders(slow: Asking) -> None:
    """Of one that is silent nothing is ended, and its weight is forgotten."""
    assert slow.mute("eu") == []
    orders = slow.orders("eu")
    assert (orders.resting, orders.weight) == (True, 7)


def test_a_region_that_edges_miss_for_a_moment_serves(slow: Asking) -> None:
    assert slow.serving() == {"eu"}


def test_no_connection_to_an_edge_is_kept(tmp_path: Path) -> None:
    """One that leaves would wait for it."""
    asked: list[tuple[str, str]] = []

    def edge(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, request.headers["connection"]))
        return httpx.Response(200, json={"regions": []})

    world = World(TWO, tmp_path / "topology.toml", tmp_path)
    with httpx.Client(transport=httpx.MockTransport(edge)) as client:
        asking = Asking(client, world, lambda _: False)
        asking.metrics()
        asking.serving()
    of_both = len(TWO.edges)
    assert asked == [("/metrics", "close")] * of_both + [("/status", "close")] * of_both
