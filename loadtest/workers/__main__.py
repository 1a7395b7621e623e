"""`python -m loadtest.workers`: what Workers cost. About four minutes.

Exit status: 0, 1 when a figure is below its floor, 2 when the edge does not start.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from loadtest.bench import probe, report
from loadtest.bench.figures import Figure
from loadtest.bench.timing import median
from loadtest.edge import cast as parts
from loadtest.edge.cast import NotStarted
from loadtest.workers import beside, cast
from loadtest.workers.cast import Edge
from loadtest.workers.rounds import DIRECT, WrongAnswer, calling, cold
from loadtest.workers.scripts import PYTHON, SCRIPTS

PROJECT = Path(__file__).resolve().parents[2]
BELOW_FLOOR, NOT_MEASURED = 1, 2
TURN = 25
"""Calls in a row before the next one's turn."""
PARTS = ("calls", "starts", "loops")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _end)
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(parts.workplace())
            region = stack.enter_context(parts.double("region"))
            edge = stack.enter_context(cast.edge(region.port, folder))
            edge.deploy(SCRIPTS)
            edge.deploy(PYTHON if options.python else ())
            samples: dict[str, dict[str, list[float]]] = {}
            found: list[Figure] = []
            if "calls" in options.parts:
                found += added(edge, options, samples)
            if "starts" in options.parts:
                found += starts(edge, options, samples)
            if "loops" in options.parts:
                found.append(beside.first_loop(edge, options.rounds, samples, say))
                found.append(beside.steady(edge, options.steady, samples, say))
    except (NotStarted, WrongAnswer) as error:
        say(str(error))
        return NOT_MEASURED
    return write(found, samples)


def added(
    edge: Edge, options: argparse.Namespace, samples: dict[str, dict[str, list[float]]]
) -> list[Figure]:
    """What the way through a Worker adds to a call, in turns with the direct one."""
    names = ["asks", *(["asks-python"] if options.python else [])]
    rounds: dict[str, list[float]] = {"direct": [], **{name: [] for name in names}}
    gaps: dict[str, list[float]] = {name: [] for name in names}
    with calling(edge.port) as caller:
        for path in (DIRECT, *(f"/w/{name}/" for name in names)):
            caller.times(path, 50)
        before = sum(edge.row(name).starts for name in names)
        for _ in range(options.rounds):
            times: dict[str, list[float]] = {name: [] for name in rounds}
            for _ in range(options.calls // TURN):  # short turns: nobody may become idle meanwhile
                times["direct"] += caller.times(DIRECT, TURN)
                for name in names:
                    times[name] += caller.times(f"/w/{name}/", TURN)
            for name, spent in times.items():
                rounds[name].append(median(spent))
            for name in names:
                gaps[name].append(rounds[name][-1] - rounds["direct"][-1])
        again = sum(edge.row(name).starts for name in names) - before
    if again:
        say("\n".join(f"{name}: {line}" for name in names for line in edge.told(name)))
    samples["a call of one piece, median, ms"] = rounds
    count = options.rounds * options.calls * len(names)
    figures = [
        Figure("env.AI.run beside the direct call, median", median(gaps["asks"]), "ms", 2, 4,
               f"{median(rounds['asks']):.2f} against {median(rounds['direct']):.2f}"),
        Figure(f"starts of a process in {count} warm requests", again, "", 0, 0.5),
    ]  # fmt: skip
    if options.python:
        python = Figure("the same in Python, median", median(gaps["asks-python"]), "ms", 4, 8,
                        f"{median(rounds['asks-python']):.2f} in all")  # fmt: skip
        figures.insert(1, python)
    for figure in figures:
        say(f"{figure.name}: {figure.value:.2f} {figure.unit}")
    return figures


def starts(
    edge: Edge, options: argparse.Namespace, samples: dict[str, dict[str, list[float]]]
) -> list[Figure]:
    """The first request after a rest, less a warm one."""
    kinds = [("says", "workerd", 100.0, 200.0)]
    if options.python:
        kinds.append(("says-python", "Python", 200.0, 400.0))
    found = []
    for name, runtime, target, floor in kinds:
        times = [cold(edge, name) for _ in range(options.starts)]
        samples.setdefault("cold start, ms", {})[runtime] = times
        about = f"from {min(times):.0f} to {max(times):.0f}"
        found.append(Figure(f"cold start, {runtime}", median(times), "ms", target, floor, about))
        say(f"cold start of {runtime}: {median(times):.0f} ms ({about})")
    return found


def write(found: Sequence[Figure], samples: dict[str, dict[str, list[float]]]) -> int:
    """JSON and table; the exit status."""
    said = shlex.join(sys.argv[1:])
    command = "make bench-workers" + (f" ARGS={shlex.quote(said)}" if said else "")
    machine, versions = probe.describe(), {"python": sys.version.split()[0]}
    build = PROJECT / "build" / "bench"
    build.mkdir(parents=True, exist_ok=True)
    table = report.markdown(command, machine, versions, found, samples)
    (build / "workers.json").write_bytes(report.as_json(command, machine, versions, found))
    (build / "workers.md").write_text(table, encoding="utf-8")
    say("\n" + table)
    return BELOW_FLOOR if any(figure.fails for figure in found) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-workers", description=__doc__)
    parser.add_argument("--rounds", type=int, help="5, or 2 with --quick")
    parser.add_argument("--calls", type=int, help="of a round")
    parser.add_argument("--starts", type=int, help="cold starts of each kind")
    parser.add_argument("--steady", type=float, help="seconds of questions to what loops")
    parser.add_argument(
        "--only", dest="parts", action="append", choices=PARTS, help="again for a second part"
    )
    parser.add_argument("--quick", action="store_true", help="less work")
    parser.add_argument("--no-python", dest="python", action="store_false")
    options = parser.parse_args(arguments)
    usual = (2, 100, 3, 12.0, PARTS) if options.quick else (5, 300, 8, 40.0, PARTS)
    names = ("rounds", "calls", "starts", "steady", "parts")
    for name, value in zip(names, usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
