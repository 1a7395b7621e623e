"""Random faults under load, for `make soak`; what each fault does by itself: test_campaign."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from core import config
from core.config_tenants import ANONYMOUS, Access, Tenant
from core.types import Role
from deploy import toml_write
from deploy.launcher import LocalWorld, run_world
from deploy.process import Pauses
from tests.tiny_text import write_tiny_folder
from tests.world.conftest import TOPOLOGIES
from tests.world.scripted import MODEL, ask, completion
from tests.world.storm import Question, Report, Storm, Victim, at_rest, unlike
from tests.world.test_real_model import CHAT, chat

pytestmark = pytest.mark.world

CONTEXT = 4096
TIGHT = 1600
"""Tokens of KV on a decode node that several answers have to share."""
LIMITS = {ANONYMOUS: Tenant(tokens_per_minute=1_000_000_000)}  # so that a ledger is kept


def seed() -> int:
    return int(os.environ.get("SKERRY_SOAK_SEED", time.time_ns() % 1_000_000))


def topology(source: Path) -> config.Topology:
    """One region of two routers and three nodes, the two that answer with little memory; and one of
    two nodes with much, of which the reader keeps what was asked twice on disk."""
    script = config.Scripted(step_ms=1.0, prefill_tokens_per_s=6000.0)
    model = config.Model(source=str(source), engine="scripted", context=CONTEXT, scripted=script)

    def node(name: str, role: Role, kv_tokens: int) -> config.Node:
        return config.Node(name=name, role=role, model=MODEL, kv_tokens=kv_tokens, speculate=False)

    tight = (
        node("eu-prefill", Role.PREFILL, 4 * CONTEXT),
        node("eu-one", Role.DECODE, TIGHT),
        node("eu-two", Role.DECODE, TIGHT),
    )
    wide = (
        replace(node("us-prefill", Role.PREFILL, 4 * CONTEXT), disk_tier=config.DiskTier()),
        node("us-decode", Role.DECODE, 4 * CONTEXT),
    )
    here = "127.0.0.1:0"
    return config.Topology(
        version=config.VERSION,
        name="storm",
        models={MODEL: model},
        edges=(
            config.Edge(name="ams", listen=here, round_trip_ms={"eu": 2, "us": 8}),
            config.Edge(name="nyc", listen=here, round_trip_ms={"us": 2, "eu": 8}),
        ),
        regions=(
            config.Region(name="eu", nodes=tight, split_min_tokens=64, routers=(config.Router(),)),
            config.Region(name="us", nodes=wide, split_min_tokens=64),
        ),
        access=Access(anonymous="until-keys"),
        tenants=LIMITS,
        routing=config.Routing(expose_nodes=True),
    )


@contextmanager
def stormy_world(folder: Path) -> Iterator[LocalWorld]:
    file = folder / "storm.toml"
    described = topology(write_tiny_folder(folder / "tiny", context=CONTEXT))
    file.write_text(toml_write.dump(described), encoding="utf-8")
    said: list[str] = []
    with run_world(
        file, say=said.append, state=folder / "state", pauses=Pauses(0.1, 0.5, 5.0)
    ) as world:
        yield world


def played_back(dice: random.Random) -> Question:
    """A prompt that is its own answer; some of them share a beginning."""
    family = dice.randrange(6)
    text = f"{family} " + "é天🦙 sea, sky and stones. " * dice.randrange(1, 25)
    text += f"and {dice.randrange(1_000_000)}."
    few = dice.random() < 0.3
    streamed = dice.random() < 0.7
    body = completion(text, max_tokens=dice.randrange(1, 60) if few else 800, stream=streamed)
    if not streamed:
        del body["stream_options"]
    return Question("/v1/completions", body, text, cut=few)


def everybody(world: LocalWorld) -> list[Victim]:
    """Nodes and their ranks twice as often as the others."""
    regions = world.world.topology.regions
    nodes = [node.name for region in regions for node in region.nodes]
    routers = [name for region in regions for name, _ in region.doors]
    return [
        *(Victim(name) for name in (*world.edges, *routers, *nodes, *nodes)),
        *(Victim(name, rank=True) for name in (*nodes, *nodes)),
    ]


def check(report: Report, world: LocalWorld, *, ledger: bool) -> None:
    print(report)
    held = at_rest(world)
    assert not held, f"{held}\n{report}"
    assert not report.wrong, str(report)
    assert report.outcomes["whole"] > 0, str(report)
    if ledger:
        assert not unlike(world, report.told), str(report)


def scripted_storm(folder: Path, *, faults: int, within_s: float, number: int) -> Report:
    with stormy_world(folder) as world:
        storm = Storm(
            world, played_back, everybody(world), seed=number, faults=faults, callers=10,
            within_s=within_s,
        )  # fmt: skip
        report = asyncio.run(storm.run())
        check(report, world, ledger=True)
    return report


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_two_hundred_faults_under_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = scripted_storm(tmp_path, faults=200, within_s=300.0, number=seed())
    with capsys.disabled():
        print(f"\n{report}")
    assert report.faults.total() == 200
    assert report.outcomes["whole"] >= 100, "too few to have met every fault"


def said_before(world: LocalWorld, questions: Sequence[str]) -> list[Question]:
    """What the world says while nothing fails."""
    found = []
    for one in questions:
        body = chat(one, max_tokens=24)
        answer = ask(world.edges["nyc"], body, CHAT)
        assert answer.done, answer.error
        found.append(Question(CHAT, body, answer.text))
    return found


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(900)
def test_twenty_faults_with_the_real_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = config.parse((TOPOLOGIES / "two-regions.toml").read_text(encoding="utf-8"))
    described = replace(described, tenants={**described.tenants, **LIMITS})
    file = tmp_path / "real.toml"
    file.write_text(toml_write.dump(described), encoding="utf-8")
    said: list[str] = []
    with run_world(
        file, say=said.append, state=tmp_path / "state", pauses=Pauses(0.1, 0.5, 5.0)
    ) as world:
        known = said_before(world, [f"What does rule {number} say?" for number in (3, 14, 33, 52)])
        storm = Storm(
            world, lambda dice: dice.choice(known), everybody(world), seed=seed(), faults=20,
            callers=3, within_s=420.0, pause_s=(1.0, 6.0), stop_s=(0.1, 5.0),
        )  # fmt: skip
        report = asyncio.run(storm.run())
        with capsys.disabled():
            print(f"\n{report}")
        check(report, world, ledger=True)
