"""Replacing parts of a running world under streams: nobody's request fails, every answer is whole,
and what does not work out leaves the world as it was."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest
from msgspec.structs import replace

from core.config import Topology, parse, read
from core.config_tenants import Tenant
from core.errors import ConfigError
from deploy import toml_write
from deploy.launcher import LocalWorld
from deploy.rollout.messages import Deploy
from deploy.rollout.running import asked, control_of, seen
from tests.world.callers import Callers
from tests.world.faults import alive, until
from tests.world.scripted import (
    MODEL,
    ask,
    completion,
    region_status,
    scripted_world,
)

pytestmark = pytest.mark.world

ROOT = Path(__file__).parents[2]
EU = {"eu", "eu-prefill", "eu-decode"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    """One of its edges is of two processes."""
    with scripted_world(
        tmp_path_factory.mktemp("rollout"), step_ms=4.0, workers={"nyc": 2}
    ) as running:
        yield running


def deploy(world: LocalWorld, unit: str, **more: Any) -> list[str]:
    """As `skerry deploy UNIT` does it; what is said."""
    what = Deploy(unit=unit, idle_s=60, ready_s=60, **more)
    return list(asked(what, world.world.state))


def pids(world: LocalWorld) -> dict[str, int]:
    return {one.name: one.pid for one in seen(control_of(world.world.state))}


def folders(world: LocalWorld) -> dict[str, str]:
    """Of the releases that the processes run from."""
    return {one.name: one.folder for one in seen(control_of(world.world.state))}


def test_edges_and_a_region_are_replaced_under_twenty_streams(
    world: LocalWorld, tmp_path: Path
) -> None:
    other = release_with(tmp_path, "regional/node/app.py", lambda text: text)
    before = pids(world)
    with Callers(world) as callers:
        assert until(lambda: len(callers.answers) >= 10)
        deploy(world, "ams", again=True)
        deploy(world, "nyc", again=True)
        deploy(world, "eu", release=str(other))
        seen_so_far = len(callers.answers)
        assert until(lambda: len(callers.answers) >= seen_so_far + 20)
    callers.check()
    after = pids(world)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"ams", "nyc", *EU}
    assert folders(world) == {name: str(other if name in EU else ROOT) for name in before}


def file_of(world: LocalWorld, folder: Path, change: Callable[[Topology], Topology]) -> Path:
    """A topology file with a change to what the world was started from."""
    path = folder / "changed.toml"
    asked_for = parse(read(world.world.state.parent / "scripted.toml"))
    path.write_text(toml_write.dump(change(asked_for)), encoding="utf-8")
    return path


def with_tenant(topology: Topology) -> Topology:
    return replace(topology, tenants={"harbour": Tenant()})


def test_a_changed_topology_replaces_who_reads_it_once(world: LocalWorld, tmp_path: Path) -> None:
    before = pids(world)
    changed = str(file_of(world, tmp_path, with_tenant))
    assert deploy(world, "nyc", topology=changed, dry_run=True)[0].startswith("1. start another")
    assert pids(world) == before
    deploy(world, "nyc", topology=changed)
    after = pids(world)
    assert {name for name in before if before[name] != after[name]} == {"nyc"}
    assert deploy(world, "nyc", topology=changed) == ["nothing to do: nyc runs this already"]
    assert deploy(world, "eu", topology=changed) == ["nothing to do: eu runs this already"]
    assert ask(world.edges["nyc"], completion("still here", max_tokens=4)).done


@pytest.mark.parametrize(
    ("find", "put", "words"),
    [
        ("step_ms", "stop_ms", r"changed.toml:\d+: .*stop_ms.*step_ms"),
        ("/tiny", "/nowhere", r"changed.toml:\d+: models.tiny.source"),
    ],
)
def test_a_topology_that_does_not_fit_is_refused_untouched(
    world: LocalWorld, tmp_path: Path, find: str, put: str, words: str
) -> None:
    before = pids(world)
    path = file_of(world, tmp_path, with_tenant)
    text = path.read_text(encoding="utf-8")
    assert find in text
    path.write_text(text.replace(find, put, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        deploy(world, "eu", topology=str(path))
    assert pids(world) == before


def without_prefill(topology: Topology) -> Topology:
    """Of region eu, which then reads prompts where it writes answers."""
    eu, *others = topology.regions
    nodes = tuple(node for node in eu.nodes if node.name != "eu-prefill")
    return replace(topology, regions=(replace(eu, nodes=nodes), *others))


def test_a_node_goes_after_an_edge_knows_it_no_more(world: LocalWorld, tmp_path: Path) -> None:
    """The region runs from an older file than the world then."""
    before = pids(world)
    less = str(file_of(world, tmp_path, without_prefill))
    deploy(world, "ams", topology=less, again=True)
    assert pids(world).keys() == before.keys()
    said = deploy(world, "eu", topology=less)
    assert any(line.endswith("drain node eu-prefill") for line in said)
    assert pids(world).keys() == before.keys() - {"eu-prefill"}
    deploy(world, "eu", topology=str(file_of(world, tmp_path, with_tenant)))
    assert pids(world).keys() == before.keys()


def under_another_name(topology: Topology) -> Topology:
    return replace(topology, name="elsewhere")


def test_the_topology_of_another_world_is_refused(world: LocalWorld, tmp_path: Path) -> None:
    before = pids(world)
    with pytest.raises(ConfigError, match=r"changed.toml:\d+: this is the topology of 'elsewhere'"):
        deploy(world, "ams", topology=str(file_of(world, tmp_path, under_another_name)))
    assert pids(world) == before


def test_an_edge_comes_at_no_other_port_than_its_own(world: LocalWorld, tmp_path: Path) -> None:
    before = pids(world)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"

        def with_another(topology: Topology) -> Topology:
            sfo = replace(topology.edges[0], name="sfo", listen=at)
            return replace(topology, edges=(*topology.edges, sfo))

        file = str(file_of(world, tmp_path, with_another))
        with pytest.raises(ConfigError, match=f"changed.toml: edge sfo: {at} is in use"):
            deploy(world, "sfo", topology=file)
    assert pids(world) == before


def release_with(folder: Path, file: str, change: Callable[[str], str]) -> Path:
    """A release that differs from this one in one file."""
    package = Path(file).parts[0]
    for name in ("core", "deploy", "edge", "kernels", "regional"):
        if name == package:
            copytree(ROOT / name, folder / name, ignore=ignore_patterns("__pycache__"))
        else:
            (folder / name).symlink_to(ROOT / name)
    path = folder / file
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def test_a_release_that_does_not_start_is_taken_back(world: LocalWorld, tmp_path: Path) -> None:
    before, places = pids(world), folders(world)
    broken = release_with(
        tmp_path, "regional/node/app.py", lambda text: f"{text}\nraise SystemExit('no good')\n"
    )
    with Callers(world, 4) as callers, pytest.raises(ConfigError) as failed:
        deploy(world, "eu", release=str(broken))
    callers.check()
    assert "ended while starting, exit code 1" in str(failed.value)
    assert "no good" in str(failed.value)
    assert str(failed.value).endswith("the world is as it was")
    after = pids(world)
    assert folders(world) == places
    assert {name for name in before if before[name] == after[name]} == set(before) - EU
    assert until(lambda: alive(world, "eu"))


def test_an_edge_that_does_not_start_leaves_the_first(world: LocalWorld, tmp_path: Path) -> None:
    before = pids(world)
    broken = release_with(
        tmp_path, "edge/serving.py", lambda text: f"{text}\nraise SystemExit('no good')\n"
    )
    with Callers(world, 2) as callers, pytest.raises(ConfigError, match="no good"):
        deploy(world, "ams", release=str(broken))
    callers.check()
    assert pids(world) == before


def test_a_release_that_speaks_another_wire_is_refused(world: LocalWorld, tmp_path: Path) -> None:
    before = pids(world)
    other = release_with(
        tmp_path, "core/types.py", lambda text: text.replace("WIRE_VERSION = 1", "WIRE_VERSION = 2")
    )
    with pytest.raises(ConfigError, match="speaks wire 2, this world 1"):
        deploy(world, "eu", release=str(other))
    assert pids(world) == before


def slower(topology: Topology) -> Topology:
    model = topology.models[MODEL]
    assert model.scripted is not None
    pace = replace(model.scripted, step_ms=80.0)
    return replace(topology, models={MODEL: replace(model, scripted=pace)})


@pytest.mark.soak
def test_a_slow_canary_is_taken_back(world: LocalWorld, tmp_path: Path) -> None:
    before = {one.name: one.topology for one in seen(control_of(world.world.state))}
    slow = str(file_of(world, tmp_path, slower))
    with Callers(world, 8, tokens=12) as callers:
        assert until(lambda: len(callers.answers) >= 60)
        with pytest.raises(ConfigError) as failed:
            deploy(world, "eu", topology=slow, canary=50, watch_s=20)
    callers.check()
    assert "region eu is worse than before: its first deltas take" in str(failed.value)
    assert str(failed.value).endswith("the world is as it was")
    assert {one.name: one.topology for one in seen(control_of(world.world.state))} == before
    status = region_status(world, "eu")
    assert not status["draining"]
    assert status["more"]["weight"] == 0
