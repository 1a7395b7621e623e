"""One scripted world for all tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from deploy.launcher import LocalWorld
from tests.world.scripted import scripted_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    with scripted_world(tmp_path_factory.mktemp("world")) as running:
        yield running
