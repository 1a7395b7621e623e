"""How long a killed node of the bundled model is away."""

from __future__ import annotations

import time

import pytest

from deploy.launcher import LocalWorld
from tests.world.faults import alive, until
from tests.world.scripted import region_status

pytestmark = [pytest.mark.world, pytest.mark.soak]

READY_S = 6.0


def test_a_killed_node_is_ready_again_in_six_seconds(real: LocalWorld) -> None:
    """Its pause before the new start is in it."""
    first = real.pid("eu-decode-1")
    began = time.monotonic()
    real.kill("eu-decode-1")
    assert until(lambda: _joined(real, first), 60)
    spent = time.monotonic() - began
    assert until(lambda: alive(real, "eu"))
    assert spent <= READY_S


def _joined(world: LocalWorld, before: int) -> bool:
    nodes = region_status(world, "eu")["nodes"]
    return any(n["name"] == "eu-decode-1" and n["alive"] and n["pid"] != before for n in nodes)
