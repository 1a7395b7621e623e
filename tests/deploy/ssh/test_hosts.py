"""Who belongs on which host, and what cannot be put on hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from core.config import Pool, Topology, load
from core.errors import ConfigError
from deploy.rollout.steps import Kind
from deploy.ssh.hosts import complaints, notes, seats
from deploy.ssh.intent import Goal, wants
from deploy.ssh.run import Ask, deploy_over_ssh
from deploy.ssh.units import Keeping, Place
from deploy.topology_diff import changes, rereads, restarts
from tests.deploy.ssh.world import topology, written


@pytest.fixture
def given(tmp_path: Path) -> Topology:
    return topology(tmp_path, tmp_path / "ssh_config")


def test_a_node_without_a_host_is_on_its_regions(given: Topology) -> None:
    found = {name: (seat.host, seat.kind, seat.unit) for name, seat in seats(given).items()}
    assert found == {
        "nyc": ("alpha", Kind.EDGE, "nyc"),
        "eu": ("beta", Kind.ROUTER, "eu"),
        "eu-prefill": ("alpha", Kind.NODE, "eu"),
        "eu-decode": ("beta", Kind.NODE, "eu"),
    }


def test_what_cannot_be_put_on_hosts_is_said_with_its_fix(given: Topology) -> None:
    edge, region = given.edges[0], given.regions[0]

    def of(unit: str, **more: object) -> list[str]:
        changed = replace(given, **more)
        return [one.what for one in complaints(changed, unit)]

    (why,) = of("nyc", edges=(replace(edge, ssh=None),))
    assert why == "edge 'nyc' has no host: give it ssh = \"USER@HOST\""
    (why,) = of("nyc", edges=(replace(edge, listen="127.0.0.1:0"),))
    assert "listen of edge 'nyc' needs a fixed port" in why
    whys = of("eu", regions=(replace(region, ssh=None, grpc="127.0.0.1:0"),))
    assert len(whys) == 2
    assert "no host for its router" in whys[0]
    assert "grpc of region 'eu' needs a fixed port" in whys[1]
    (why,) = of("eu", regions=(replace(region, pools={"shared": Pool()}),))
    assert "only `skerry up` does" in why
    with pytest.raises(ConfigError, match="did you mean 'nyc'"):
        of("nyx")


def test_a_refusal_names_file_and_line_and_no_host_is_asked(
    given: Topology, tmp_path: Path
) -> None:
    region = replace(given.regions[0], http="127.0.0.1:0")
    path = written(tmp_path, replace(given, regions=(region,)))
    world = load(path, state=tmp_path / "state")
    line = next(
        number
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if text.startswith("http = ")
    )
    with pytest.raises(ConfigError, match=rf"far\.toml:{line}: http of region 'eu' needs"):
        deploy_over_ssh(world, Ask("eu"), tmp_path / "cache", print)
    assert not (tmp_path / "state").exists()


def test_which_host_a_process_is_on_restarts_nothing(given: Topology) -> None:
    region = given.regions[0]
    nodes = tuple(replace(node, ssh="gamma") for node in region.nodes)
    moved = replace(
        given,
        edges=(replace(given.edges[0], ssh="beta"),),
        regions=(replace(region, ssh="gamma", nodes=nodes),),
        ssh=replace(given.ssh, folder="elsewhere"),
    )
    found = changes(given, moved)
    assert found
    assert restarts(found, moved) == []
    assert rereads(found, moved) == []


def test_an_address_that_others_cannot_dial_is_noted(given: Topology) -> None:
    assert any("regions.eu.grpc" in note and "alpha" in note for note in notes(given, "eu"))
    region = replace(given.regions[0], http="10.0.0.5:8701", grpc="10.0.0.5:8702")
    assert list(notes(replace(given, regions=(region,)), "eu")) == []


def test_a_gpu_node_keeps_its_devices_and_has_a_place_for_compiled_kernels(
    given: Topology,
) -> None:
    node = replace(given.regions[0].nodes[1], device="cuda", threads=4)
    changed = replace(given, regions=(replace(given.regions[0], nodes=(node,)),))
    place = Place("/opt/skerry", "far")
    goal = Goal(place, Keeping(system=True), "1a2b", changed, "3c4d")
    found = wants(changed, seats(changed)["eu-decode"], goal)
    assert found.devices
    assert found.environment["OMP_NUM_THREADS"] == "4"
    assert found.environment["TRITON_CACHE_DIR"].startswith("/opt/skerry/far/state/")
    assert not wants(changed, seats(changed)["nyc"], goal).devices
