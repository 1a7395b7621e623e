"""Two worlds for all tests that leave them as they found them: scripted, and with real weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import deploy
from deploy.launcher import LocalWorld, run_world
from deploy.process import Pauses
from tests.world.scripted import scripted_world

TIMEOUT_S = 300
"""A world on a crowded machine takes a minute to come up, and `until` has patience of its own."""
TOPOLOGIES = Path(deploy.__file__).parent / "topologies"


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
