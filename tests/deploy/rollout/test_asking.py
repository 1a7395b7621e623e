"""Who is asked about a part of a running world."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from core.config import World
from core.errors import ConfigError
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
