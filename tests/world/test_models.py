"""`skerry models add | remove` in a running world: real processes, scripted ranks."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.config import Scripted
from core.errors import ConfigError
from deploy.launcher import LocalWorld
from deploy.rollout.messages import AddModel, RemoveModel
from deploy.rollout.running import asked
from tests.deploy.test_cli import skerry
from tests.tiny_text import write_tiny_folder
from tests.world.callers import Callers
from tests.world.faults import until
from tests.world.scripted import (
    MODEL,
    Answer,
    ask,
    completion,
    lines_of,
    region_status,
    scripted_world,
    streaming,
    take,
)
from tests.world.test_rollout import deploy, file_of, pids, with_tenant

pytestmark = pytest.mark.world

OTHER = "@cf/lights/second"
EDGES = {"ams", "nyc"}
NODES = {"eu-second", "us-second"}
SPLIT = ["us-second-prefill", "us-second-decode"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorld]:
    with scripted_world(tmp_path_factory.mktemp("models"), step_ms=4.0) as running:
        yield running


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("second") / "tiny", context=4096)


def change(world: LocalWorld, what: AddModel | RemoveModel) -> list[str]:
    return list(asked(what, world.world.state))


def second(folder: Path, **more: object) -> AddModel:
    pace = Scripted(step_ms=4.0)
    given = {
        "name": OTHER, "source": str(folder), "engine": "scripted", "scripted": pace,
        "ready_s": 90.0, **more,
    }  # fmt: skip
    return AddModel(**given)  # type: ignore[arg-type]  # of mixed types


def other(prompt: str, **more: object) -> dict[str, object]:
    return completion(prompt, model=OTHER, max_tokens=5, **more)


def test_a_model_comes_and_goes_under_streams(
    world: LocalWorld, source: Path, tmp_path: Path
) -> None:
    before = pids(world)
    assert ask(world.edges["ams"], other("is it there?")).status == 404
    with Callers(world, 4) as callers:
        assert until(lambda: len(callers.answers) >= 4)
        change(world, second(source, aliases=("second",)))
        for edge in world.edges.values():
            assert ask(edge, other("is it there now?")).text.startswith("is it")
        added = pids(world)
        assert {name for name in before if before[name] != added[name]} == EDGES
        assert added.keys() - before.keys() == NODES
        file = str(file_of(world, tmp_path, with_tenant))  # as who does not know of it has it
        for dry_run in (True, False):
            with pytest.raises(
                ConfigError, match=rf"changed.toml:\d+: '{OTHER}' is missing, which"
            ):
                deploy(world, "ams", topology=file, dry_run=dry_run)
        assert pids(world) == added

        slow = Answer(0, ask(world.edges["ams"], other("hold")).headers)
        prompt = "a last word that takes its time " * 80
        body = completion(prompt, model="second", max_tokens=1000)
        with streaming(world.edges["ams"], body) as up:
            lines = lines_of(up)
            while not slow.text:
                take(slow, next(lines))
            change(world, RemoveModel(name=OTHER, idle_s=60))
            for line in lines:
                take(slow, line)
        assert slow.done
        assert prompt.startswith(slow.text)
        seen = len(callers.answers)
        assert until(lambda: len(callers.answers) >= seen + 4)
    callers.check()
    assert ask(world.edges["ams"], other("is it gone?")).status == 404
    after = pids(world)
    assert after.keys() == before.keys()
    assert {name for name in before if before[name] != after[name]} == EDGES
    left = region_status(world, "eu")["nodes"]
    assert {node["name"] for node in left} == {"eu-prefill", "eu-decode"}


def without_weights(folder: Path) -> Path:
    """Described in full, and nothing in it."""
    write_tiny_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_that_does_not_start_leaves_the_world_as_it_was(
    world: LocalWorld, tmp_path: Path
) -> None:
    before = pids(world)
    with Callers(world, 4) as callers, pytest.raises(ConfigError) as failed:
        change(world, second(without_weights(tmp_path / "bare"), engine="torch", scripted=None))
    callers.check()
    assert str(failed.value).endswith("the world is as it was")
    assert "ended while starting" in str(failed.value)
    assert pids(world) == before
    assert ask(world.edges["ams"], other("is it there?")).status == 404


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"name": MODEL}, "a model 'tiny' is there already"),
        ({"regions": ("eur",)}, "no region is named 'eur'; did you mean 'eu'?"),
        ({"like": "eu-decod"}, "did you mean 'eu-decode'?"),
        ({"pool": "shared"}, "shared"),
        ({"source": "/nowhere"}, "'/nowhere' does not exist"),
        ({"kv_tokens": 1 << 40}, "does not fit: 0 MB of weights and"),
        ({"aliases": ("tiny-alias",)}, "'tiny-alias' is used more than once"),
    ],
)
def test_what_cannot_be_added(
    world: LocalWorld, source: Path, more: dict[str, object], words: str
) -> None:
    before = pids(world)
    with pytest.raises(ConfigError, match=re.escape(words)):
        change(world, second(source, **more))
    assert pids(world) == before


def test_what_cannot_be_removed(world: LocalWorld) -> None:
    with pytest.raises(ConfigError, match="no model is named 'tony'; did you mean 'tiny'"):
        change(world, RemoveModel(name="tony"))
    with pytest.raises(ConfigError, match="region 'eu' would have no node"):
        change(world, RemoveModel(name=MODEL))


def test_the_command_reads_the_files_and_what_it_added_outlives_its_router(
    world: LocalWorld, source: Path
) -> None:
    state = ("--state", str(world.world.state))
    digest = skerry("models", "digest", str(source)).stdout.strip()
    assert re.fullmatch("sha256:[0-9a-f]{64}", digest)
    given = ("models", "add", OTHER, "--source", str(source), "--engine", "scripted", *state)
    wrong = skerry(*given, "--digest", "sha256:" + "0" * 64)
    assert wrong.returncode == 2
    assert f"is not what you want: its digest is {digest}" in wrong.stderr
    shown = skerry(*given, "--dry-run", "--region", "us")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[:2] == [
        "1. tell router us of the change",
        "2. start us-second",
    ]
    added = skerry(*given, "--digest", digest, "--region", "us", "--split", "--on-demand")
    assert (added.returncode, added.stderr) == (0, "")
    kept = tomllib.loads(added.stdout.split("topology's file:")[1])
    assert kept["models"][OTHER]["digest"] == digest
    assert [node["name"] for node in kept["regions"]["nodes"]] == SPLIT
    listed = skerry("models", "list", "--edge", world.edges["ams"])
    assert OTHER in listed.stdout

    nodes = {node["name"]: node for node in region_status(world, "us")["nodes"]}
    assert [nodes[name]["off"] for name in SPLIT] == [True, True]
    assert not NODES & pids(world).keys()
    assert ask(world.edges["ams"], other("wake up")).text.startswith("wake")
    before = world.pid("us")
    world.kill("us")
    assert until(lambda: world.pid("us") != before)
    assert until(lambda: ask(world.edges["nyc"], other("still there")).done)

    removed = skerry("models", "remove", OTHER, *state)
    assert (removed.returncode, removed.stderr) == (0, "")
    assert f"{OTHER} is not served any more" in removed.stdout
