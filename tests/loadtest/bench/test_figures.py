"""From samples to figures, verdicts, JSON, table and picture: nothing is measured here."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from loadtest.bench import chart, report
from loadtest.bench.figures import OURS, SPECULATING, Figure, best_peer, figures

SAMPLES = {
    "decode 1": {OURS: [100.0, 50.0, 120.0], "llama.cpp": [80.0, 40.0, 120.0], "vllm": [40.0]},
    "decode 8": {OURS: [300.0], "llama.cpp": [200.0], "vllm": [250.0], "transformers": [10.0]},
    "mixed p99 ms": {OURS: [90.0, 100.0], "vllm": [100.0, 100.0]},
    "repeat": {OURS: [100.0], SPECULATING: [110.0]},
    "start": {OURS: [2.0], "llama.cpp": [1.0]},
    "memory": {OURS: [500.0]},
}


def by_name() -> dict[str, Figure]:
    return {figure.name: figure for figure in figures(SAMPLES)[0]}


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    figure = by_name()["decode batch 1 / llama.cpp"]
    assert figure.value == pytest.approx(1.25)  # 1.25, 1.25, 1.0; of medians it would be the same
    assert "100 against 80 of llama.cpp" in figure.about


def test_a_peer_that_dropped_out_counts_by_the_rounds_it_took_part_in() -> None:
    assert by_name()["decode batch 1 / vLLM CPU"].value == pytest.approx(2.5)


def test_the_best_peer_is_the_fastest_other_contestant() -> None:
    assert by_name()["decode batch 8 / best peer"].value == pytest.approx(1.2)
    assert best_peer({OURS: [9.0], SPECULATING: [99.0], "vllm": [1.0]}) == "vllm"
    assert best_peer({OURS: [9.0], "vllm": []}) is None


def test_what_was_not_measured_is_named() -> None:
    missing = figures(SAMPLES)[1]
    assert "prefill 1,024 / best peer" in missing
    assert "start to first token" not in missing


@pytest.mark.parametrize(
    ("value", "target", "floor", "verdict"),
    [
        (1.15, 1.15, 0.9, "target met"),
        (1.149, 1.15, 0.9, "floor met"),
        (0.9, 1.15, 0.9, "floor met"),
        (0.899, 1.15, 0.9, "BELOW THE FLOOR"),
        (2.5, 2.5, 5.0, "target met"),
        (2.6, 2.5, 5.0, "floor met"),
        (5.0, 2.5, 5.0, "floor met"),
        (5.1, 2.5, 5.0, "BELOW THE FLOOR"),
    ],
)
def test_verdict(value: float, target: float, floor: float, verdict: str) -> None:
    figure = Figure("f", value, "×", target, floor)
    assert figure.verdict == verdict
    assert figure.fails == (verdict == "BELOW THE FLOOR")


def test_the_json_has_the_form_that_checks_read() -> None:
    found = figures(SAMPLES)[0]
    read = json.loads(report.as_json("make bench-engine", "a machine", {"vllm": "1"}, found))
    assert set(read) == {"command", "machine", "versions", "figures"}
    assert read["versions"] == {"vllm": "1"}
    assert {tuple(sorted(line)) for line in read["figures"]} == {
        ("floor", "name", "target", "unit", "value")
    }
    assert read["figures"][0]["value"] == pytest.approx(1.25)
    assert [line["name"] for line in read["figures"]] == [figure.name for figure in found]


def test_the_table_says_verdict_and_leaves_blanks() -> None:
    found = figures(SAMPLES)[0]
    text = report.markdown("make bench-engine", "a machine", {"vllm": "1"}, found, SAMPLES)
    memory = next(line for line in text.splitlines() if "resident memory" in line)
    assert "BELOW THE FLOOR" in memory
    assert "≤ 250" in memory
    rates = next(line for line in text.splitlines() if line.startswith("| decode, batch 8"))
    assert rates.count("–") == 1  # who was not asked
    assert len({line.count("|") for line in text.splitlines() if line.startswith("| deco")}) <= 2


def test_the_picture_is_well_formed_and_to_scale() -> None:
    panels = [("tokens <a second>", {OURS: 100.0, "a & b": 50.0}), ("none", {"a & b": 0.0})]
    root = ElementTree.fromstring(chart.svg('x "y" & z', "note", panels, OURS))
    space = {"s": "http://www.w3.org/2000/svg"}
    bars = root.findall("s:rect", space)
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[0] == pytest.approx(2 * widths[1])
    assert widths[2] == 0
    assert bars[1].attrib["fill"] == bars[2].attrib["fill"] != bars[0].attrib["fill"]
    assert "a & b" in [text.text for text in root.findall("s:text", space)]
