"""`make load`: two minutes of the mix of users against a world of this machine, or against servers
that run already. Ends with a summary, Locust's HTML report, and an exit code by the service level.
A world that wants API keys gets the one in the variable SKERRY_KEY.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.users.running import (
    LAPTOP,
    LOCUSTFILE,
    ROOT,
    Failed,
    Running,
    bases_of,
    environment,
    needs_locust,
    world,
)
from loadtest.users.shapes import SHAPES

OUT = ROOT / "build" / "load"
WORKERS = ROOT / "examples" / "workers"
WORKER = "chat-typescript"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    OUT.mkdir(parents=True, exist_ok=True)
    try:
        needs_locust()
        if options.edges:
            if options.worker:
                raise Failed("--worker needs a world of this command's own; give --chat-worker URL")
            return _run(options, bases_of(options.edges))
        with world(options.topology) as running:
            if options.worker:
                options.more += ["--chat-worker", deployed(running, options.worker)]
            return _run(options, running.urls)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.users", description=__doc__)
    parser.add_argument("--topology", default="two-regions", help="of the world that is started")
    parser.add_argument(
        "--edges",
        default="",
        help="base URLs of running servers, with commas; their key: SKERRY_KEY in the environment",
    )
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--shape", default="flat", choices=sorted(SHAPES))
    parser.add_argument(
        "--worker", nargs="?", const=WORKER, default="", metavar="EXAMPLE",
        help="a chat of examples/workers that is deployed and asked too",
    )  # fmt: skip
    parser.add_argument("--processes", type=int, default=1, help="of Locust; more share the users")
    parser.add_argument("--slo-ttft", type=float, default=LAPTOP.ttft_s, help="seconds")
    parser.add_argument("--slo-per-token", type=float, default=LAPTOP.per_token_s, help="seconds")
    parser.add_argument("--slo-share", type=float, default=LAPTOP.share)
    parser.add_argument("more", nargs="*", help="after --: options of the Locust file")
    return parser


def command(options: argparse.Namespace, edges: Sequence[str], out: Path) -> list[str]:
    """Locust's own, without a web page."""
    return [
        *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless"),
        *("--host", edges[0], "--edges", ",".join(edges)),
        *("--users", str(options.users), "--spawn-rate", str(options.users)),
        *("--run-time", f"{options.minutes * 60:.0f}s", "--shape", options.shape),
        *("--slo-ttft", str(options.slo_ttft), "--slo-per-token", str(options.slo_per_token)),
        *("--slo-share", str(options.slo_share), "--stop-timeout", "20", "--only-summary"),
        *("--html", str(out / "report.html"), "--answers", str(out / "answers.json")),
        *(("--processes", str(options.processes)) if options.processes > 1 else ()),
        *options.more,
    ]


def deployed(running: Running, example: str) -> str:
    """The Worker's address on the first edge. Raises Failed."""
    said = running.skerry("worker", "deploy", "--cwd", str(WORKERS / example))
    print(said, end="", flush=True)
    found = re.search(r"http\S+/w/\S+", said)
    if found is None:
        raise Failed(f"`skerry worker deploy` told no address:\n{said}")
    return found[0]


def _run(options: argparse.Namespace, edges: Sequence[str]) -> int:
    print(f"{options.minutes:g} minutes, {options.users} users, {options.shape}, at {edges}")
    done = subprocess.run(command(options, edges, OUT), cwd=ROOT, env=environment(), check=False)
    print(f"report: {OUT / 'report.html'}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
