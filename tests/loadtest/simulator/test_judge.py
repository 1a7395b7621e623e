"""From runs to figures: which part of which run each is made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.routers.bench import Row
from loadtest.routers.replay import Tally
from loadtest.simulator import __main__ as program
from loadtest.simulator import bench, decision, judge
from loadtest.simulator.bench import EQUAL, EVEN, LOSSES, LOST, OURS, SKEWED, Loss, Played
from loadtest.simulator.measure import Recovery, Summary
from loadtest.simulator.workloads import HELD_OUT, TUNED_ON

GOOD = Summary(
    hit=0.4, hit_of_infinite=0.95, mean_ttft_s=1.0, p99_ttft_s=5.0, busiest=1.05, spilled=0.0,
    far=0.1, moved_keys=3, hot_peak=1, lost=0, cut=0,
)  # fmt: skip
BAD = replace(GOOD, hit_of_infinite=0.2, mean_ttft_s=9.0, busiest=3.0)


def _played(ours: Summary = GOOD, second: Summary = GOOD) -> list[Played]:
    """Every cell; rivals take twice as long."""
    rival = replace(GOOD, mean_ttft_s=2.0)
    played = []
    for cell in bench.cells(1):
        mine = cell.policy == OURS
        losses = tuple(Loss(0, 2, Recovery(0.9 + i / 100, 0.97)) for i, _ in enumerate(cell.losses))
        played.append(
            Played(
                cell,
                ours if mine else rival,
                ours if mine else rival,
                second if mine else rival,
                losses,
                20.0,
            )
        )
    return played


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision, "milliseconds", lambda: (0.5, 0.9))


def test_every_workload_is_judged_and_what_was_tuned_on_is_told_apart() -> None:
    found = judge.figures(_played())
    names = [one.name for one in found]
    assert len(names) == len(set(names))
    for trace in TUNED_ON:
        for part in (trace, f"{trace}, second half (held out)"):
            for what in ("hit by tokens", "busiest region", "even load", "skewed load"):
                assert any(name.startswith(part) and what in name for name in names)
    for trace in HELD_OUT:
        assert any(name.startswith(f"{trace} (held out), even load") for name in names)
        marked = any(name.startswith(f"{trace} (held out): busiest") for name in names)
        assert marked == trace.startswith("tenant mix")
    assert not any(one.fails for one in found)


def test_a_bad_second_half_shows_in_the_held_out_figures_alone() -> None:
    failing = {one.name for one in judge.figures(_played(second=BAD)) if one.fails}
    assert len(failing) == 4 * len(TUNED_ON)
    assert all("second half (held out)" in name for name in failing)


def test_losses_are_all_counted() -> None:
    by_name = {one.name: one for one in judge.figures(_played())}
    [lost] = [one for name, one in by_name.items() if name.endswith("requests lost")]
    assert lost.about == f"{2 * len(LOSSES)} answers that had begun ended in an error event"
    [before] = [one for name, one in by_name.items() if name.endswith("/ before")]
    assert before.value == pytest.approx(0.935)
    assert before.about == "0.900 to 0.970"


def test_each_region_is_lost_once_in_the_held_out_half() -> None:
    assert sorted(site for site, _, _ in LOSSES) == list(range(8))
    assert min(at for _, at, _ in LOSSES) > 3537 / 2
    [cell] = [one for one in bench.cells(1) if one.place == LOST]
    assert cell.losses == LOSSES


def test_rivals_play_wherever_a_ratio_is_made() -> None:
    cells = bench.cells(1)
    for trace in (*TUNED_ON, *HELD_OUT):
        for place in (EQUAL, EVEN, SKEWED):
            policies = {one.policy for one in cells if (one.trace, one.place) == (trace, place)}
            if trace in HELD_OUT:
                assert len(policies) == {EQUAL: 1, EVEN: 5, SKEWED: 0}[place]
            else:
                assert len(policies) == 5


def test_routers_have_a_table_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        Row("conversation", name, Tally(9, 9, 0.3, hit, 1.1, 1.0, 5.0, 0.1))
        for name, hit in (("skerry, 16 edges", 0.9), ("vllm-router, cache_aware", 0.5))
    ]
    monkeypatch.setattr(program, "PROJECT", tmp_path)
    monkeypatch.setattr(bench, "play_all", lambda *_: _played())
    monkeypatch.setattr("loadtest.routers.bench.compare", lambda *_: rows)
    assert program.main([]) == 0
    build = tmp_path / "build" / "bench"
    page = (build / "bench-routing.md").read_text()
    assert "| conversation | vllm-router, cache_aware | 0.500 | 1.10 | 1.000 |" in page
    assert "conversation, second half: hit / that of real routers" in page
    assert "vllm-router</text>" in (build / "routers.svg").read_text()


def test_the_page_is_written_and_says_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "PROJECT", tmp_path)
    monkeypatch.setattr(bench, "play_all", lambda *_: _played(second=BAD))
    assert program.main(["--no-routers"]) == 1
    page = (tmp_path / "build" / "bench" / "bench-routing.md").read_text()
    assert "| conversation, first half (tuned on) | 0.950 | 1.05 | 0.500 | 0.500 |" in page
    assert "| conversation, second half (held out) | 0.200 | 3.00 | 4.500 | 4.500 |" in page
    assert "| made, seed 1 (held out) | 0.950 | 1.05 | 0.500 |  |" in page
    assert "BELOW THE FLOOR" in page
    assert (tmp_path / "build" / "bench" / "routing.svg").read_text().startswith("<svg")
    assert page in capsys.readouterr().out
