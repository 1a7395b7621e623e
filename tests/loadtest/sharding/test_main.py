"""What a run writes down, and when it fails."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadtest.bench.figures import Figure
from loadtest.sharding import raw_read
from loadtest.sharding.__main__ import (
    Sent,
    Setting,
    load_figures,
    pipeline_figures,
    traffic_figures,
    write,
)
from loadtest.sharding.least import Span


def setting(build: Path) -> Setting:
    return Setting(model=build / "none", build=build, dtype="float32", rounds=1, tokens=8)


def test_ratios_are_against_the_least(tmp_path: Path) -> None:
    tp = Sent(counted=1010, wire=1200, least=1000, tokens=10)
    pp = Sent(counted=500, wire=None, least=500, tokens=10)
    found = list(traffic_figures(tp, pp))
    assert [(one.value, one.verdict) for one in found] == [
        (1.01, "target met"), (1.2, "BELOW THE FLOOR"), (1.0, "target met"),
    ]  # fmt: skip
    slow = Span((10.0, 10.0), 20.0)
    stretch, imbalance = pipeline_figures([slow], setting(tmp_path))
    assert (round(stretch.value, 2), imbalance.value) == (1.94, 1.0)
    (loading,) = load_figures([0.5, 0.7, 0.9])
    assert (loading.value, loading.verdict) == (0.7, "floor met")


def test_the_report_has_all_figures_and_a_missed_floor_is_an_error(tmp_path: Path) -> None:
    good = Figure("good", 1.0, "×", 1.02, 1.1)
    bad = Figure("bad", 1.3, "×", 1.02, 1.1)
    assert write([good], setting(tmp_path)) == 0
    assert write([good, bad], setting(tmp_path)) == 1
    said = msgspec.json.decode((tmp_path / "sharding.json").read_bytes())
    assert set(said) == {"command", "machine", "versions", "figures"}
    assert said["figures"][1] == {
        "name": "bad", "value": 1.3, "unit": "×", "target": 1.02, "floor": 1.1,
    }  # fmt: skip
    assert "bad" in (tmp_path / "sharding.svg").read_text()


def test_files_are_read_whole_whether_in_memory_or_not(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(bytes(5 << 20))
    (tmp_path / "b.safetensors").write_bytes(b"b")
    (tmp_path / "config.json").write_bytes(b"{}")
    files = raw_read.weight_files(tmp_path)
    assert [path.name for path in files] == ["a.safetensors", "b.safetensors"]
    raw_read.evict(files)
    assert 0 < raw_read.seconds(files) < 60
