"""One wheel of these sources for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.ssh.wheels import House, Wheelhouse


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> House:
    return Wheelhouse(tmp_path_factory.mktemp("wheels"), None).own()


@pytest.fixture(scope="session")
def wheels(own: House) -> Path:
    """A wheelhouse with Skerry's own wheel."""
    return own.folder
