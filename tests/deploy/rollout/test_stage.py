"""What a stage remembers of who was told what."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import structs

from core.config import World, parse
from core.errors import ConfigError
from deploy.fleet import Fleet
from deploy.releases import own
from deploy.rollout.asking import Asking
from deploy.rollout.attending import Attending, Patience
from deploy.rollout.stage import LocalStage, Making
from deploy.rollout.steps import Reread
from deploy.specs import Makings
from deploy.where import SHIPPED

TOPOLOGY = parse((SHIPPED / "local.toml").read_text(encoding="utf-8"))
ROUTER = TOPOLOGY.regions[0].name


@dataclass
class Router:
    """Takes what it is told, and answers too late the first time."""

    told: list[str] = field(default_factory=list)

    def tell(self, router: str, topology: Path, *, mute: bool) -> None:
        assert not mute
        self.told.append(topology.name)
        if len(self.told) == 1:
            raise ConfigError(f"router {router} does not answer")


def test_a_router_that_answers_too_late_is_told_of_the_way_back(tmp_path: Path) -> None:
    release, router = own(), Router()
    before = Making(World(TOPOLOGY, tmp_path / "topology.toml", tmp_path), release)
    region = structs.replace(TOPOLOGY.regions[0], split_min_tokens=7)
    changed = structs.replace(TOPOLOGY, regions=(region, *TOPOLOGY.regions[1:]))
    after = Making(World(changed, tmp_path / "topology-2.toml", tmp_path), release)
    process, made = SimpleNamespace(spec=None), {ROUTER: before}
    stage = LocalStage(
        fleet=cast("Fleet", {ROUTER: process}),
        makings=Makings(tmp_path, {}),
        made=made,
        after={ROUTER: after},
        asking=cast("Asking", router),
        attending=cast("Attending", None),
        patience=Patience(),
        say=lambda _: None,
    )
    with pytest.raises(ConfigError, match="does not answer"):
        stage.take(Reread(ROUTER))
    stage.take(Reread(ROUTER, back=True))
    assert router.told == ["topology-2.toml", "topology.toml"]
    assert made[ROUTER] is before
    assert str(before.world.path) in process.spec.arguments
    stage.take(Reread(ROUTER))
    assert made[ROUTER] is after
    assert str(after.world.path) in process.spec.arguments
