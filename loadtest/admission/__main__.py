"""`python -m loadtest.admission`: keys, limits and usage counted by several processes under kills.

About two minutes. Exit status: 0, 1 when a figure is below its floor, 2 when nothing could be
measured (`redis-server` is needed).
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import shlex
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from core.usage import UsageReader, UsageRecord
from loadtest.admission import timing, traffic
from loadtest.admission.cast import Cast, NoRedis, cast
from loadtest.admission.judge import Verdict, judge
from loadtest.bench import probe, report
from loadtest.bench.figures import Figure
from loadtest.edge.cast import PROJECT, NotStarted

LEASE = 0.1
"""The topology's default share of a limit."""
TOKENS_PER_MINUTE = 6_000
"""Of the tight tenant: less than it asks for."""


def figures(
    verdict: Verdict, highest: int, limit: int, taken: Sequence[timing.Taken]
) -> list[Figure]:
    """`highest`: tokens that all edges counted in the fullest window."""
    before = sorted(one.before_ms for one in taken)
    after = sorted(one.after_ms for one in taken)
    over = (highest - limit) / (limit * LEASE)
    agreed = 100 * verdict.matched / verdict.answered if verdict.answered else 0.0
    told = 100 * (1 - _ratio(verdict.unheard, verdict.records))
    single = 100 * (1 - _ratio(verdict.twice, verdict.records))
    share = 100 * (verdict.left + verdict.cut) / verdict.requests
    broken = f"{verdict.left} left, {verdict.cut} cut of {verdict.requests}, {share:.1f} %"
    return [
        Figure("usage sent that the ledger has", agreed, "%", 100, 100, broken),
        Figure("ledger over usage sent", _ratio(verdict.written, verdict.sent), "×", 1, 1),
        Figure("whole records that their callers were told", told, "%", 100, 100, "unbroken ones"),
        Figure("requests with one record", single, "%", 100, 100),
        Figure("highest minute over its limit", over, "leases", 0, 1, f"{highest} of {limit}"),
        Figure("added by admission, p50", before[len(before) // 2], "ms", 0.1, 0.3),
        Figure("added by admission, p99", before[int(len(before) * 0.99)], "ms", 0.3, 0.6),
        Figure("added by settlement, p99", after[int(len(after) * 0.99)], "ms", 0.4, 0.8),
    ]


def records_of(cast: Cast) -> list[UsageRecord]:
    """Of all edges, each as often as it is written."""
    reader = UsageReader()
    return [one for edge in cast.edges for one in reader.read(edge.state / "usage")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.admission", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--edges", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="processes of an edge")
    parser.add_argument("--timed", type=int, default=5000, help="requests of each timed process")
    options = parser.parse_args(arguments)
    command = "make bench-admission"
    if given := (arguments if arguments is not None else sys.argv[1:]):
        command += f" ARGS={shlex.quote(shlex.join(given))}"
    try:
        with tempfile.TemporaryDirectory(prefix="skerry-admission-") as folder:
            say(f"timing: 2 processes × {options.timed} requests on one ledger")
            taken = timing.measure(Path(folder), processes=2, requests=options.timed)
            say(f"counting: {options.requests} requests, {options.edges} edges")
            with cast(
                Path(folder), edges=options.edges, workers=options.workers,
                tokens_per_minute=TOKENS_PER_MINUTE,
            ) as running:  # fmt: skip
                with traffic.window_of(running, TOKENS_PER_MINUTE) as window:
                    seen = asyncio.run(traffic.run(running, options.requests, window))
                verdict = judge(seen, records_of(running))
    except (NoRedis, NotStarted) as error:
        say(str(error))
        return 2
    found = figures(verdict, window.highest, TOKENS_PER_MINUTE, taken)
    machine = probe.describe()
    versions = {"python": platform.python_version(), "redis": metadata.version("redis")}
    build = PROJECT / "build" / "bench"
    build.mkdir(parents=True, exist_ok=True)
    (build / "admission.json").write_bytes(report.as_json(command, machine, versions, found))
    say(report.markdown(command, machine, versions, found, {}))
    say(f"{verdict.answered} answered, {verdict.refused} refused, {verdict.sent} tokens told")
    return 1 if any(one.fails for one in found) else 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _ratio(one: int, other: int) -> float:
    return one / other if other else 0.0


if __name__ == "__main__":
    sys.exit(main())
