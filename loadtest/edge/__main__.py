"""`python -m loadtest.edge`: what an edge adds to a stream, beside vLLM's router. About 3 minutes.

Exit status: 0, 1 when a figure is below its floor, 2 when our own edge does not start.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from loadtest.bench import chart, probe, report
from loadtest.bench.figures import Figure
from loadtest.bench.timing import median
from loadtest.edge import cast, installed, rounds
from loadtest.edge.cast import NotStarted, Running
from loadtest.edge.rounds import Samples

PROJECT = Path(__file__).resolve().parents[2]
OURS, ROUTER, DIRECT = "skerry", cast.ROUTER_PACKAGE, "direct"
BELOW_FLOOR, NOT_MEASURED = 1, 2
FILES = 4096


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _end)  # processes that were started must be ended too
    _more_files()
    try:
        return measure(options)
    except NotStarted as error:
        say(str(error))
        return NOT_MEASURED


def measure(options: argparse.Namespace) -> int:
    samples, notes = Samples(), [f"machine: {probe.describe()}"]
    binary = cast.router_binary()
    versions = {
        "python": platform.python_version(),
        "uvloop": metadata.version("uvloop"),
        "uvicorn": metadata.version("uvicorn"),
        "httptools": metadata.version("httptools"),
    }
    with ExitStack() as stack:
        folder = stack.enter_context(cast.workplace())
        region = stack.enter_context(cast.double("region"))
        engine = stack.enter_context(cast.double("openai"))
        edge = stack.enter_context(cast.edge(region.port, folder))
        idle_mb = edge.resident_mb()
        direct = Running(DIRECT, engine.port, engine.process)
        group = [edge, direct]
        if binary is None:
            say("vLLM's router is not there (make bench-peers): nothing to compare with")
        else:
            path, versions[ROUTER] = binary
            group.append(stack.enter_context(cast.router(engine.port, folder, path)))
        play(group, options, samples)
        note = f"idle {idle_mb:.0f} MB, {edge.resident_mb():.0f} MB after all of it"
        notes.append(f"memory of the edge: {note}")
    found = figures(samples, idle_mb, installed.size_mb(PROJECT))
    return write(found, samples, notes, versions, options)


def play(group: Sequence[Running], options: argparse.Namespace, samples: Samples) -> None:
    for one in group:
        rounds.warm(one)
    for number in range(options.rounds):
        turn = group if number % 2 == 0 else list(reversed(group))
        for one in turn:
            got = rounds.burst(one, options.streams)
            samples.bursts.setdefault(one.name, []).append(got)
            say(f"round {number + 1}  {one.name:<12} {got.streams_per_s:7,.0f} streams/s, "
                f"{got.cpu_us:5.0f} µs of CPU each")  # fmt: skip
        for one in turn:
            first = rounds.first(one, options.firsts)
            samples.firsts.setdefault(one.name, []).append(first)
            say(f"round {number + 1}  {one.name:<12} first piece after {first.p50:.2f} ms, p99 "
                f"{first.p99:.2f} ms")  # fmt: skip
    for one in group:
        paced = rounds.paced(one, streams=options.paced, events=options.seconds * 50, pause_ms=20)
        samples.paced[one.name] = paced
        say(f"{options.paced} × 50/s  {one.name:<12} gaps off by {paced.gap_p50_ms:.2f} ms, p99 "
            f"{paced.gap_p99_ms:.2f} ms; {paced.cpu_us:.1f} µs of CPU an event; pace kept "
            f"{paced.kept_pace:.1%}; {paced.resident_mb:.0f} MB")  # fmt: skip


def figures(samples: Samples, idle_mb: float, installed_mb: float) -> list[Figure]:
    """Ratios and differences are medians of the rounds' own."""
    paced = samples.paced[OURS]
    through, beside = samples.firsts[OURS], samples.firsts[DIRECT]
    pairs = list(zip(through, beside, strict=True))
    found = [
        Figure("300 streams × 50/s: added gap, p99", paced.gap_p99_ms, "ms", 10, 20,
               f"median {paced.gap_p50_ms:.2f} ms; the double itself read directly: "
               f"{samples.paced[DIRECT].gap_p99_ms:.2f} ms"),
        Figure("300 streams × 50/s: CPU an event", paced.cpu_us, "µs", 35, 50),
        Figure("time to the first piece added at 16 streams, median",
               median([ours.p50 - other.p50 for ours, other in pairs]), "ms", 2, 4),
        Figure("time to the first piece added at 16 streams, p99",
               median([ours.p99 - other.p99 for ours, other in pairs]), "ms", 8, 15),
        Figure("memory of an idle edge process", idle_mb, "MB", 80, 110),
        Figure("installed size of the plain extra", installed_mb, "MB", 60, 100),
    ]  # fmt: skip
    router = samples.bursts.get(ROUTER)
    if router:
        ours = samples.bursts[OURS]
        ratios = [
            mine.streams_per_s / other.streams_per_s
            for mine, other in zip(ours, router, strict=True)
        ]
        about = (
            f"{median([one.streams_per_s for one in ours]):,.0f} against "
            f"{median([one.streams_per_s for one in router]):,.0f} of {ROUTER}"
        )
        found.insert(
            2, Figure(f"streams/s of 64 events / {ROUTER}", median(ratios), "×", 0.8, 0.5, about)
        )
    return found


def write(
    found: Sequence[Figure],
    samples: Samples,
    notes: Sequence[str],
    versions: dict[str, str],
    options: argparse.Namespace,
) -> int:
    """JSON, table, chart; the exit status."""
    said = shlex.join(sys.argv[1:])
    command = "make bench-edge" + (f" ARGS={shlex.quote(said)}" if said else "")
    machine = probe.describe()
    build = PROJECT / "build" / "bench"
    table = report.markdown(command, machine, versions, found, side_by_side(samples))
    files = {
        build / "edge.json": report.as_json(command, machine, versions, found),
        build / "edge.md": table.encode(),
        (PROJECT / "docs" / "bench" if options.chart else build) / "edge.svg": drawing(
            samples, machine, versions
        ).encode(),
    }
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    say("\n" + table)
    for note in notes:
        say(note)
    say("written: " + ", ".join(os.path.relpath(path) for path in files))
    return BELOW_FLOOR if any(figure.fails for figure in found) else 0


def side_by_side(samples: Samples) -> dict[str, dict[str, list[float]]]:
    bursts, firsts, paced = samples.bursts, samples.firsts, samples.paced
    return {
        "streams of 64 events a second": {
            name: [one.streams_per_s for one in many] for name, many in bursts.items()
        },
        "CPU of a stream of 64 events, µs": {
            name: [one.cpu_us for one in many] for name, many in bursts.items() if name != DIRECT
        },
        "first piece at 16 streams, median, ms": {
            name: [one.p50 for one in many] for name, many in firsts.items()
        },
        "first piece at 16 streams, p99, ms": {
            name: [one.p99 for one in many] for name, many in firsts.items()
        },
        "300 × 50/s, gap off, p99, ms": {n: [one.gap_p99_ms] for n, one in paced.items()},
        "300 × 50/s, CPU of an event, µs": {
            name: [one.cpu_us] for name, one in paced.items() if name != DIRECT
        },
        "300 × 50/s, resident, MB": {
            name: [one.resident_mb] for name, one in paced.items() if name != DIRECT
        },
    }


def drawing(samples: Samples, machine: str, versions: dict[str, str]) -> str:
    panels = [
        (measure, {name: median(numbers) for name, numbers in by_name.items()})
        for measure, by_name in side_by_side(samples).items()
        if "first piece" not in measure
    ]
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    return chart.svg("What an edge adds to a stream", f"{machine}; {said}", panels, OURS)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-edge", description=__doc__)
    parser.add_argument("--rounds", type=int, help="5, or 1 with --quick")
    parser.add_argument("--streams", type=int, help="of a burst, by each of 16 clients")
    parser.add_argument("--firsts", type=int, help="streams of each client for the first piece")
    parser.add_argument("--paced", type=int, default=300, help="streams at a steady pace")
    parser.add_argument("--seconds", type=int, help="of the steady pace")
    parser.add_argument("--quick", action="store_true", help="one round, less work")
    parser.add_argument("--chart", action="store_true", help="write the picture to docs/bench")
    options = parser.parse_args(arguments)
    usual = (1, 60, 4, 5) if options.quick else (5, 200, 8, 20)
    for name, value in zip(("rounds", "streams", "firsts", "seconds"), usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _more_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
