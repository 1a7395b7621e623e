"""`python -m loadtest.simulator`: routing judged on public traces, in virtual time, and beside real
routers of other projects where they are installed (`make bench-peers ARGS='vllm-router
sglang-router'`).

Takes about six minutes on two idle cores, and three more with the routers. Exit status: 0, 1 when a
figure is below its floor.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.bench import chart, probe, report
from loadtest.bench.figures import Figure
from loadtest.routers import bench as routers
from loadtest.routers.peers import installed
from loadtest.simulator import bench, judge
from loadtest.simulator.bench import EQUAL, EVEN, OURS, SKEWED, Played
from loadtest.simulator.workloads import HELD_OUT, TUNED_ON, WORKLOADS

PROJECT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    some = bench.cells(options.seed, options.traces)
    if options.quick:
        some = [one for one in some if one.policy == OURS and one.place == EQUAL]
    played = bench.play_all(some, options.processes, say)
    rows = _routers(options)
    found = [*judge.figures(played), *routers.figures(rows)]
    return write(found, played, rows, options)


def _routers(options: argparse.Namespace) -> list[routers.Row]:
    """What is not installed is said and left out."""
    if options.quick or not options.routers:
        return []
    there = installed(PROJECT)
    for name in there.missing():
        say(f"not installed, left out: {name} (make bench-peers)")
    return routers.compare(there, options.seed, PROJECT / "build" / "bench" / "routers", say)


def write(
    found: Sequence[Figure],
    played: Sequence[Played],
    rows: Sequence[routers.Row],
    options: argparse.Namespace,
) -> int:
    """JSON, table, chart; the exit status."""
    said = shlex.join(sys.argv[1:])
    command = "make bench-routing" + (f" ARGS={shlex.quote(said)}" if said else "")
    machine = probe.describe()
    versions = {"python": platform.python_version(), **installed(PROJECT).there}
    parts = (_parts(played), _figures(found), routers.table(rows) if rows else "", _cells(played))
    table = "\n".join(part for part in parts if part) + f"\n`{command}` on {machine}.\n"
    build = PROJECT / "build" / "bench"
    charts = PROJECT / "docs" / "bench" if options.chart else build
    files = {
        build / "bench-routing.json": report.as_json(command, machine, versions, found),
        build / "bench-routing.md": table.encode(),
        charts / "routing.svg": drawing(played, options.seed).encode(),
    }
    if rows:
        files[charts / "routers.svg"] = _hits(rows).encode()
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    say("\n" + table)
    say("written: " + ", ".join(os.path.relpath(path) for path in files))
    return int(any(figure.fails for figure in found))


def drawing(played: Sequence[Played], seed: int) -> str:
    """Mean time to the first token of every policy, a panel for each trace and load."""
    panels: list[tuple[str, dict[str, float]]] = []
    for trace in WORKLOADS:
        for place in (EQUAL, EVEN, SKEWED) if trace in TUNED_ON else (EVEN,):
            bars = {
                one.cell.policy: 1000 * one.whole.mean_ttft_s
                for one in sorted(played, key=lambda one: one.cell.policy != OURS)
                if (one.cell.trace, one.cell.place) == (trace, place)
            }
            if bars:
                panels.append((f"{trace}, {place}, ms", bars))
    note = f"16 edges, 8 regions of 4,000 blocks of 512 tokens, status 1 s old, seed {seed}"
    return chart.svg("Mean time to the first token, simulated", note, panels, OURS)


def _hits(rows: Sequence[routers.Row]) -> str:
    """Of every router, a panel for each trace."""
    panels = [
        (
            f"{trace}, second half, %",
            {
                row.router.removesuffix(", cache_aware"): 100 * row.tally.hit_of_infinite
                for row in rows
                if row.trace == trace
            },
        )
        for trace in dict.fromkeys(row.trace for row in rows)
    ]
    note = "8 backends of 4,000 blocks of 512 tokens; the others see every request at once"
    return chart.svg("Hits against one infinite cache", note, panels, "skerry, 16 edges")


def _parts(played: Sequence[Played]) -> str:
    """What the constants were tuned on beside what they have never seen."""
    by_cell = judge.by_name(played)
    rows = [(f"{trace}, first half (tuned on)", trace, judge.first) for trace in TUNED_ON]
    lines = [
        "| requests | hit / infinite | busiest / mean | TTFT / best rival, even | skewed |",
        "|---|---|---|---|---|",
    ]
    for name, trace, part in sorted([*rows, *judge.parts()], key=lambda row: row[1] in HELD_OUT):
        told = []
        ours = by_cell.get((trace, EQUAL, OURS))
        told += (
            [f"{part(ours).hit_of_infinite:.3f}", f"{part(ours).busiest:.2f}"] if ours else ["", ""]
        )
        for place in (EVEN, SKEWED):
            mine, best = (
                by_cell.get((trace, place, OURS)),
                judge.best_rival(by_cell, trace, place, part),
            )
            told.append(f"{part(mine).mean_ttft_s / best[1]:.3f}" if mine and best else "")
        if any(told):
            lines.append(f"| {name} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def _figures(found: Sequence[Figure]) -> str:
    lines = ["| figure | measured | target | floor | |", "|---|---|---|---|---|"]
    for one in found:
        sign = "≤" if one.smaller_is_better else "≥"
        about = f" ({one.about})" if one.about else ""
        lines.append(
            f"| {one.name} | **{one.value:.3g} {one.unit}**{about} | {sign} {one.target:g}"
            f" | {sign} {one.floor:g} | {one.verdict} |"
        )
    return "\n".join(lines) + "\n"


def _cells(played: Sequence[Played]) -> str:
    lines = [
        "| trace | load | policy | hit / infinite | busiest / mean | TTFT mean, s | p99 | spill |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in sorted(played, key=lambda one: one.cell.name):
        cell, of = one.cell, one.whole
        lines.append(
            f"| {cell.trace} | {cell.place} | {cell.policy} | {of.hit_of_infinite:.3f}"
            f" | {of.busiest:.2f} | {of.mean_ttft_s:.3f} | {of.p99_ttft_s:.2f} | {of.spilled:.1%} |"
        )
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-routing", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--traces", nargs="+", choices=tuple(WORKLOADS), default=tuple(WORKLOADS))
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--quick", action="store_true", help="our own policy, equal round trips")
    parser.add_argument("--no-routers", dest="routers", action="store_false")
    parser.add_argument("--chart", action="store_true", help="write the picture to docs/bench")
    return parser.parse_args(arguments)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
