"""What a running world says of its processes while they come and go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from core.config import World, parse
from core.errors import ConfigError
from deploy.fleet import Fleet, running
from deploy.process import PAUSES, Spec
from deploy.rollout.desk import Desk
from deploy.rollout.messages import Seen, Told, View
from deploy.specs import Makings
from deploy.where import SHIPPED

TOPOLOGY = parse((SHIPPED / "local.toml").read_text(encoding="utf-8"))


def desk_of(fleet: Fleet, folder: Path) -> Desk:
    world = World(TOPOLOGY, folder / "topology.toml", folder)
    return Desk(
        asked=TOPOLOGY,
        world=world,
        fleet=fleet,
        makings=Makings(folder, {}),
        recorded=lambda _: None,
    )


class Hasty(Fleet):
    """One of its processes has gone by the time that it is looked at."""

    def __iter__(self) -> Iterator[str]:
        return iter(("gone", *super().__iter__()))


def test_who_goes_while_it_is_asked_is_left_out(tmp_path: Path) -> None:
    told: list[Told] = []
    with running([], say=lambda _: None) as first:
        fleet = Hasty(link=first._link, say=lambda _: None, pauses=PAUSES)
        name = TOPOLOGY.regions[0].name
        spec = Spec(name, "router", "tests.deploy.stubs", ("absent",), {}, tmp_path / "log")
        process = fleet.start(spec)
        desk_of(fleet, tmp_path).serve(View(), told.append)
        process.end(0.0)
    assert [one.name for one in told if isinstance(one, Seen)] == [name]


def test_what_another_region_is_to_have_is_not_followed_yet(tmp_path: Path) -> None:
    """A rollout of one unit may come with a file that says more."""
    with running([], say=lambda _: None) as fleet:
        desk = desk_of(fleet, tmp_path)
        region = TOPOLOGY.regions[0]
        more = (*region.nodes, structs.replace(region.nodes[0], name="not-yet"))
        regions = (structs.replace(region, nodes=more), *TOPOLOGY.regions[1:])
        described = structs.replace(TOPOLOGY, regions=regions)
        desk._world = World(described, tmp_path / "topology-2.toml", tmp_path)
        followed = desk.followed
    assert followed.topology.region(region.name) == region
    assert followed.path == desk.world.path


def test_a_region_whose_router_is_just_being_taken_out_is_not_followed(tmp_path: Path) -> None:
    with running([], say=lambda _: None) as fleet:
        desk = desk_of(fleet, tmp_path)
        del desk._made[TOPOLOGY.regions[0].name]
        assert desk.followed.topology.regions == ()


def test_who_was_taken_out_is_not_started_again(tmp_path: Path) -> None:
    with (
        running([], say=lambda _: None) as fleet,
        pytest.raises(ConfigError, match="no process is named 'gone'"),
    ):
        desk_of(fleet, tmp_path).spec("gone")
