"""A model whose nodes are off until somebody asks: real processes, scripted ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from core import config
from core.config_scale import Scale
from core.types import Role
from deploy import toml_write
from deploy.launcher import LocalWorld, run_world
from deploy.process import Pauses
from deploy.up import expected, sleeping
from tests.tiny_text import write_tiny_folder
from tests.world.faults import until
from tests.world.scripted import CONTEXT, MODEL, ask, completion, region_status, topology

IDLE_S = 10.0
"""Enough to ask twice in it on a machine that is busy."""


@dataclass(frozen=True, slots=True)
class Sleepy:
    world: LocalWorld
    said: list[str]

    @property
    def status(self) -> dict[str, Any]:
        return region_status(self.world, "home")

    @property
    def alive(self) -> list[str]:
        return [node["name"] for node in self.status["nodes"] if node["alive"]]


@pytest.fixture(scope="module")
def sleepy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sleepy]:
    folder = tmp_path_factory.mktemp("sleepy")
    source = write_tiny_folder(folder / "tiny", context=CONTEXT)
    nodes = tuple(
        config.Node(name=name, role=Role.COMBINED, model=MODEL, kv_tokens=CONTEXT, speculate=False)
        for name in ("one", "two")
    )
    described = msgspec.structs.replace(
        topology(source, step_ms=1.0, prefill_tokens_per_s=4000.0),
        edges=(config.Edge(name="here", listen="127.0.0.1:0"),),
        regions=(
            config.Region(name="home", nodes=nodes, scale={MODEL: Scale(least=0, idle_s=IDLE_S)}),
        ),
    )
    file = folder / "sleepy.toml"
    file.write_text(toml_write.dump(described), encoding="utf-8")
    said: list[str] = []
    with run_world(
        file, say=said.append, state=folder / "state", pauses=Pauses(0.1, 0.5, 5.0)
    ) as world:
        yield Sleepy(world, said)


def test_nobody_asks_and_no_node_runs(sleepy: Sleepy) -> None:
    assert sleepy.alive == []
    assert {node["off"] for node in sleepy.status["nodes"]} == {True}
    (model,) = sleepy.status["models"]
    assert model["name"] == MODEL
    assert model["start_s"] > 0
    described = sleepy.world.world.topology
    assert list(sleeping(described)) == [f"{MODEL} is off in home: the first request starts a node"]
    assert "1 routers, 0 nodes, 1 edge processes" in expected(described)


def test_a_request_brings_one_node_and_it_goes_when_it_is_idle(sleepy: Sleepy) -> None:
    asked = time.monotonic()
    answer = ask(sleepy.world.edges["here"], completion("wake up", max_tokens=5))
    spent_s = time.monotonic() - asked
    assert (answer.status, answer.done, answer.error) == (200, True, None)
    assert sleepy.alive == ["one"]
    assert until(lambda: any("one is up after" in line for line in sleepy.said))
    (up,) = [line for line in sleepy.said if "one is up after" in line]
    assert spent_s <= float(up.split()[4]) + 10.0, "it waited for the node, and for nothing else"

    again = ask(sleepy.world.edges["here"], completion("wake up", max_tokens=5))
    assert again.text == answer.text
    assert sum("starts" in line for line in sleepy.said) == 1

    assert until(lambda: sleepy.alive == [] and "one is off" in sleepy.said), sleepy.said
    assert "one" not in sleepy.world.processes
    (wanted,) = sleepy.status["more"]["wanted"]
    assert (wanted["nodes"], wanted["why"]) == (0, "idle")
