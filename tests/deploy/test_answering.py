"""Who does not answer in a running world, and whom `skerry status` asks."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from core.config import World
from deploy import toml_write
from deploy.answering import silent, silent_at
from deploy.client import AskFailed
from deploy.state import claim, edges_of_first
from deploy.status import EdgeView, first_view
from tests.deploy.rollout.test_plan import SPLIT, TWO, region, topology

HELD, GONE, BUSY = 4, 12, 3
"""Ports: a process that is stopped, one that is not there, one that refuses all."""


def answer(request: httpx.Request) -> httpx.Response:
    if request.url.port == HELD:
        raise httpx.ReadTimeout("timed out", request=request)
    if request.url.port == GONE:
        raise httpx.ConnectError("refused", request=request)
    if request.url.path == "/status":
        return httpx.Response(200, content=msgspec.json.encode(EdgeView(edge="ams")))
    return httpx.Response(503 if request.url.port == BUSY else 200)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    def client(*_: object, **__: object) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(answer))

    monkeypatch.setattr("deploy.answering.client", client)
    monkeypatch.setattr("deploy.status.edge_client", client)
    eu = region("eu", *SPLIT, routers=2)
    eu = replace(eu, routers=(replace(eu.routers[0], http=f"127.0.0.1:{GONE}"),))
    described = topology(eu, TWO.regions[1])
    path = tmp_path / "topology.toml"
    path.write_text(toml_write.dump(described), encoding="utf-8")
    return World(described, path, tmp_path / "state")


def test_who_refuses_answers_and_who_is_held_does_not(world: World) -> None:
    assert silent(world) == {"nyc", "eu.2"}
    assert silent(world, ["nyc"]) == {"eu.2"}


def test_only_a_world_of_this_machine_is_asked(world: World) -> None:
    edges = {edge.name: edge.url for edge in world.topology.edges}
    with claim(world.state) as state:
        state.record(edges, {}, world.path)
        root = world.state.parent
        assert silent_at(edges["ams"], ["ams"], root) == {"nyc", "eu.2"}
        assert silent_at("http://127.0.0.1:99", [], root) == frozenset()
        assert edges_of_first(root) == list(edges.values())


@pytest.mark.usefixtures("world")
def test_the_next_edge_is_asked_where_the_first_one_is_held() -> None:
    held, ams = (f"http://127.0.0.1:{port}" for port in (HELD, BUSY))
    assert first_view([held, ams]) == (ams, EdgeView(edge="ams"))
    with pytest.raises(AskFailed, match="timed out"):
        first_view([held, f"http://127.0.0.1:{GONE}"])
