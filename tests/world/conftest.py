"""Two worlds for all tests that leave them as they found them: scripted, and with real weights."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

import deploy
from deploy.launcher import LocalWorld, run_world
from deploy.process import Pauses
from tests.world.faults import alive, until
from tests.world.scripted import scripted_world

TIMEOUT_S = 300
"""A world on a crowded machine takes a minute to come up, and `until` has patience of its own."""
TOPOLOGIES = Path(deploy.__file__).parent / "topologies"


@pytest.fixture(autouse=True)
def _whole(request: pytest.FixtureRequest) -> None:
    """A test of a world that many share begins with all of it: whoever was killed before is up
    again, the hosts of Workers too."""
    for name in {"world", "real"} & set(request.fixturenames):
        if not hasattr(request.module, name):  # else it has one of its own
            assert until(partial(_is_whole, request.getfixturevalue(name)))


def _is_whole(world: LocalWorld) -> bool:
    for edge in world.world.topology.edges:
        httpx.get(f"http://{edge.admin}/", timeout=30, trust_env=False)  # raises where none is
    return all(alive(world, region) for region in world.routers)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    with scripted_world(tmp_path_factory.mktemp("world")) as running:
        yield running


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    """`two-regions.toml` with the bundled model."""
    state = tmp_path_factory.mktemp("real") / "state"
    said: list[str] = []
    topology = TOPOLOGIES / "two-regions.toml"
    with run_world(topology, say=said.append, state=state, pauses=Pauses(0.1, 0.5, 5.0)) as world:
        yield world


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
