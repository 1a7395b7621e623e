"""What an edge or a region that has gone does not leave to one of its name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from core.config import World
from core.orders import Orders, orders_file, write_orders
from deploy.rollout.leftovers import forget
from deploy.specs import Makings
from edge.workers.shelf import Card, Deployment, Shelf
from tests.deploy.rollout.test_plan import SPLIT, TWO, region

SERVED = (Deployment("v1", 7),)


class Freed(list[str]):
    def free(self, addresses: Iterable[str]) -> None:
        self.extend(addresses)


def world_of(folder: Path, admin: str | None) -> World:
    edges = (replace(TWO.edges[0], admin=admin),)
    return World(replace(TWO, edges=edges), folder / "topology.toml", folder)


def test_orders_ports_and_workers_are_gone(tmp_path: Path) -> None:
    freed = Freed()
    asia = region("asia", *SPLIT, routers=2)
    nyc = replace(TWO.edges[1], admin="127.0.0.1:9")
    for name in ("asia", "asia.2", "nyc", "eu"):
        write_orders(orders_file(tmp_path, name), Orders(resting=True))
    shelf = Shelf(tmp_path / "workers" / "nyc")
    shelf.write("chat", Card(tenant="t", deployments=SERVED, secrets={"KEY": "hidden"}))
    Shelf(tmp_path / "workers" / "ams").write("chat", Card(tenant="t", deployments=SERVED))
    queue = tmp_path / "queue-asia.sqlite"
    queue.touch()
    said: list[str] = []
    world = world_of(tmp_path, "127.0.0.1:8")
    forget(world, [asia], [nyc], cast("Makings", freed), said.append)
    assert said == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "orders-eu.json", queue.name, "workers",
    ]  # fmt: skip
    assert [path.name for path in (tmp_path / "workers").iterdir()] == ["ams"]
    assert set(freed) == {"127.0.0.1:1", "127.0.0.1:2", asia.routers[0].http, nyc.listen, nyc.admin,
                          asia.routers[0].grpc}  # fmt: skip


@pytest.mark.parametrize("admin", [None, "127.0.0.1:8"])
def test_workers_that_no_other_edge_has_stay(tmp_path: Path, admin: str | None) -> None:
    """Others may have been deployed while this one was down, or could not be copied."""
    shelf = Shelf(tmp_path / "workers" / "nyc")
    for name in ("chat", "apt"):
        shelf.write(name, Card(tenant="t", deployments=SERVED))
    Shelf(tmp_path / "workers" / "ams").write("apt", Card(tenant="t", deployments=SERVED))
    said: list[str] = []
    nyc = [TWO.edges[1]]
    forget(world_of(tmp_path, admin), [], nyc, cast("Makings", Freed()), said.append)
    assert "chat" in shelf.names()
    (line,) = said
    assert "chat" in line
    assert ("apt" in line) is (admin is None)
