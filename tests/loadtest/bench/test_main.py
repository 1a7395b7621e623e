"""What a run leaves behind and what it exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.bench import peers
from loadtest.bench.__main__ import BELOW_FLOOR, parse, write
from loadtest.bench.cast import Setting
from loadtest.bench.figures import OURS
from loadtest.bench.rounds import Contestants


@pytest.mark.parametrize(("start", "status"), [(2.0, 0), (4.0, 0), (6.0, BELOW_FLOOR)])
@pytest.mark.parametrize("native", [True, False])
def test_files_and_exit_status(tmp_path: Path, start: float, status: int, native: bool) -> None:
    said: list[str] = []
    setting = Setting(
        project=tmp_path,
        model=tmp_path / "model.gguf",
        build=tmp_path / "build",
        threads=2,
        native=native,
        step_tokens=512,
        say=said.append,
    )
    group = Contestants({}, None, 100, said.append)
    group.note("start", OURS, start)
    group.note("decode 1", OURS, 50.0)
    group.failures["vllm"] = "gave no answer"
    found = peers.find(tmp_path)
    assert write(group, setting, found, ["a note"], parse(["--quick"])) == status

    name = "bench-engine" if native else "bench-engine-native-off"
    read = json.loads((tmp_path / "build" / f"{name}.json").read_text())
    assert [figure["value"] for figure in read["figures"]] == [start]
    raw = json.loads((tmp_path / "build" / f"{name}.raw.json").read_text())
    assert raw["samples"]["decode 1"] == {OURS: [50.0]}
    assert raw["bounds"] == ["a note"]
    assert "start to first token" in (tmp_path / "build" / f"{name}.md").read_text()
    assert list((tmp_path / "build").glob("*.svg"))


def test_rounds_by_default() -> None:
    assert (parse([]).rounds, parse([]).mixed_rounds) == (3, 2)
    assert (parse(["--quick"]).rounds, parse(["--quick"]).mixed_rounds) == (1, 1)
    assert parse(["--rounds", "7", "--quick"]).rounds == 7
    assert parse(["--native", "off"]).native == "off"
