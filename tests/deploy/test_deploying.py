"""`skerry deploy` on the command line: what it asks the running world, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from core.errors import ConfigError
from deploy.commands import app
from deploy.rollout import running
from deploy.rollout.control import Tell, serving
from deploy.rollout.messages import AddModel, Ask, Change, Deploy, RemoveModel, Said, Told
from deploy.state import claim


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[list[Ask]]:
    """What comes to the world that runs on `tmp_path/state`."""
    came: list[Ask] = []

    def serve(what: Ask, tell: Tell) -> None:
        came.append(what)
        tell(Said("[1/1] a step"))
        if isinstance(what, Deploy) and what.unit == "us":
            raise ConfigError("it broke\nthe world is as it was")

    with claim(tmp_path / "state") as folder, serving(tmp_path / "c.sock", serve) as where:
        folder.record({}, {}, None, where)
        yield came


def test_options_reach_the_world(asked: list[Ask], tmp_path: Path) -> None:
    topology = tmp_path / "new.toml"
    topology.write_text("", encoding="utf-8")
    words = [
        *("deploy", "eu", "--state", str(tmp_path / "state"), "--topology", str(topology)),
        *("--release", str(tmp_path), "--canary", "10", "--for", "5", "--again", "--dry-run"),
        *("--wait", "7", "--ready-within", "8"),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert done.output == "[1/1] a step\n"
    assert asked == [
        Deploy(
            unit="eu", topology=str(topology), release=str(tmp_path), canary=10, watch_s=5,
            again=True, dry_run=True, idle_s=7, ready_s=8,
        )
    ]  # fmt: skip


def test_a_failure_is_the_last_word(asked: list[Ask], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["deploy", "us", "--state", str(tmp_path / "state")])
    assert done.output == "[1/1] a step\n"
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).endswith("the world is as it was")
    assert asked == [Deploy(unit="us", watch_s=60)]


@pytest.mark.parametrize("words", [["--canary", "0"], ["--canary", "100"], ["--for", "0"]])
def test_values_out_of_range_ask_nothing(
    asked: list[Ask], tmp_path: Path, words: list[str]
) -> None:
    done = CliRunner().invoke(app, ["deploy", "eu", "--state", str(tmp_path / "state"), *words])
    assert done.exit_code == 2
    assert asked == []


@pytest.mark.parametrize(
    "what", [Deploy(unit="eu"), AddModel(name="m", source="x"), RemoveModel(name="m")]
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_who_leaves_is_told_that_the_world_goes_on(
    asked: list[Ask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Change, dry_run: bool
) -> None:
    def interrupted(_: Path, __: Ask) -> Iterator[Told]:
        yield Said("[1/2] a step")
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "ask", interrupted)
    lines = running.asked(replace(what, dry_run=dry_run), tmp_path / "state")
    assert next(lines) == "[1/2] a step"
    if not dry_run:
        assert "`skerry status`" in next(lines)
    with pytest.raises(KeyboardInterrupt):
        next(lines)
