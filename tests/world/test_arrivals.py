"""A region and an edge come to a world that runs, under streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from core.config import Topology
from core.errors import ConfigError
from deploy.launcher import LocalWorld
from deploy.state import current_of
from tests.world.callers import Callers
from tests.world.faults import until
from tests.world.scripted import ask, completion, scripted_world
from tests.world.test_rollout import deploy, file_of, pids

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    with scripted_world(tmp_path_factory.mktemp("arrivals"), step_ms=4.0) as running:
        yield running


def grown(topology: Topology) -> Topology:
    eu, (ams, *_) = topology.regions[0], topology.edges
    nodes = tuple(replace(node, name=f"asia-{node.role}") for node in eu.nodes)
    trips = {**ams.round_trip_ms, "asia": 1}
    sfo = replace(ams, name="sfo", round_trip_ms={"asia": 1, "eu": 9, "us": 5})
    return replace(
        topology,
        regions=(*topology.regions, replace(eu, name="asia", nodes=nodes)),
        edges=(*(replace(edge, round_trip_ms=trips) for edge in topology.edges), sfo),
    )


def stunted(topology: Topology) -> Topology:
    """Its new node wants what no machine has."""
    after = grown(topology)
    asia = after.regions[-1]
    nodes = tuple(replace(node, kv_tokens=1 << 50) for node in asia.nodes)
    return replace(after, regions=(*after.regions[:-1], replace(asia, nodes=nodes)))


def test_one_that_does_not_come_up_leaves_the_world_as_it_was(
    world: LocalWorld, tmp_path: Path
) -> None:
    before, edges = pids(world), dict(world.edges)
    with pytest.raises(ConfigError, match="the world is as it was"):
        deploy(world, "asia", topology=str(file_of(world, tmp_path, stunted)))
    assert (pids(world), world.edges) == (before, edges)


def test_a_region_and_an_edge_come_under_streams(world: LocalWorld, tmp_path: Path) -> None:
    before = pids(world)
    file = str(file_of(world, tmp_path, grown))
    with Callers(world, 4) as callers:
        assert until(lambda: len(callers.answers) >= 4)
        deploy(world, "asia", topology=file)
        assert ask(world.edges["sfo"], completion("hello from here", max_tokens=4)).done
        status = httpx.get(f"{world.edges['ams']}/status", trust_env=False).json()
        assert {one["name"]: one["state"] for one in status["regions"]} == {
            "eu": "fresh", "us": "fresh", "asia": "fresh",
        }  # fmt: skip
    callers.check()
    after = pids(world)
    assert after.keys() - before.keys() == {"asia", "asia-prefill", "asia-decode", "sfo"}
    assert {name for name in before if before[name] != after[name]} == {"ams", "nyc"}
    assert deploy(world, "asia", topology=file) == ["nothing to do: asia runs this already"]
    assert deploy(world, "eu", topology=file) == ["nothing to do: eu runs this already"]
    current = current_of(world.world.state)
    assert current is not None
    assert current.edges["sfo"] == world.edges["sfo"]

    lost = world.pid("asia")
    world.kill("asia")
    assert until(lambda: world.pid("asia") != lost)
    deploy(world, "sfo", again=True)
    assert ask(world.edges["sfo"], completion("and again", max_tokens=4)).done
