"""`make bench-load`: how many streams one Locust process reads without delaying its own clock.

A server that paces ten events a second and computes nothing is asked by few users and by many, in
turns; what the many's times to the first token have more is the generator's own doing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import psutil

from loadtest.bench import probe, report
from loadtest.bench.__main__ import BELOW_FLOOR, PROJECT, say
from loadtest.bench.figures import Figure
from loadtest.bench.timing import median
from loadtest.users.running import LOCUSTFILE, ROOT, environment

FEW, MANY = 20, 300
EVENTS_PER_S = 10


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.users.capacity", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=12, help="of each run")
    options = parser.parse_args(argv)
    shifts, shares = [], []
    with _paced() as address:
        for number in range(options.rounds):
            few, _ = _run(address, FEW, options.seconds)
            many, share = _run(address, MANY, options.seconds)
            shifts.append(1000 * (many - few))
            shares.append(share)
            say(
                f"round {number + 1}: TTFT p90 {1000 * few:.1f} ms of {FEW} streams, "
                f"{1000 * many:.1f} ms of {MANY}; {share:.0%} of a core"
            )
    figures = [
        Figure(f"TTFT p90, {MANY} streams at {EVENTS_PER_S} events/s more than {FEW}",
               median(shifts), "ms", 5.0, 10.0),
        Figure(f"CPU of one Locust process with {MANY} streams", median(shares), "core", 0.9, 1.0),
    ]  # fmt: skip
    for figure in figures:
        say(f"{figure.name}: {figure.value:.3g} {figure.unit}, {figure.verdict}")
    command = f"python -m loadtest.users.capacity --rounds {options.rounds}"
    versions = {"locust": metadata.version("locust")}
    folder = PROJECT / "build" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "load.json").write_bytes(report.as_json(command, probe.describe(), versions, figures))
    return BELOW_FLOOR if any(figure.fails for figure in figures) else 0


def _run(address: str, users: int, seconds: int) -> tuple[float, float]:
    """p90 of the times to the first token in seconds, once all users are there; share of a core."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answers.json"
        command = [
            *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless"),
            *("--host", address, "--users", str(users), "--spawn-rate", str(users)),
            *("--run-time", f"{seconds}s", "--think", "0.3", "--only-summary"),
            *("--answers", str(out), "--max-tokens", "30"),
        ]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        times = psutil.Process(process.pid)
        spent_s = 0.0
        while process.poll() is None:
            try:
                spent_s = sum(times.cpu_times()[:2])
                process.wait(0.2)
            except (subprocess.TimeoutExpired, psutil.Error):
                continue
        told = json.loads(out.read_text())["answers"]
        steady = sorted(one[5] for one in told if one[4] > 4.0 and one[5] is not None)
        if not steady or any(one[3] for one in told):
            raise SystemExit(f"the run of {users} users failed: {len(told)} answers")
        return steady[int(0.9 * len(steady))], spent_s / seconds


@contextmanager
def _paced() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtest.users.paced"], cwd=ROOT, env=environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None, "it is a pipe"
    assert process.stdin is not None, "it is a pipe"
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(10)


if __name__ == "__main__":
    sys.exit(main())
