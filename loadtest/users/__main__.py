"""`make load`: two minutes of the mix of users against a world of this machine, or against servers
that run already. Ends with a summary, Locust's HTML report, and an exit code by the service level.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from loadtest.users.shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
LOCUSTFILE = Path(__file__).with_name("locustfile.py")
OUT = ROOT / "build" / "load"
START_S = 180.0
END_S = 15.0
TTFT_S, PER_TOKEN_S = 3.0, 0.4
"""The service level of a laptop's CPU; give others for other machines."""


class Failed(Exception):
    """The world did not come up."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    OUT.mkdir(parents=True, exist_ok=True)
    try:
        if options.edges:
            return _run(options, options.edges.split(","))
        with world(options.topology) as edges:
            return _run(options, edges)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.users", description=__doc__)
    parser.add_argument("--topology", default="two-regions", help="of the world that is started")
    parser.add_argument("--edges", default="", help="base URLs of running servers, with commas")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--shape", default="flat", choices=sorted(SHAPES))
    parser.add_argument("--processes", type=int, default=1, help="of Locust; more share the users")
    parser.add_argument("--slo-ttft", type=float, default=TTFT_S, help="seconds")
    parser.add_argument("--slo-per-token", type=float, default=PER_TOKEN_S, help="seconds")
    parser.add_argument("--slo-share", type=float, default=0.95)
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


def _run(options: argparse.Namespace, edges: Sequence[str]) -> int:
    print(f"{options.minutes:g} minutes, {options.users} users, {options.shape}, at {edges}")
    done = subprocess.run(command(options, edges, OUT), cwd=ROOT, env=environment(), check=False)
    print(f"report: {OUT / 'report.html'}")
    return done.returncode


class _Current(msgspec.Struct):
    edges: dict[str, str]


@contextmanager
def world(topology: str) -> Iterator[list[str]]:
    """A world of its own, in a state folder of its own; the URLs of its edges. Raises Failed."""
    with tempfile.TemporaryDirectory(prefix="skerry-load-") as folder:
        state, log = Path(folder) / "state", Path(folder) / "up.log"
        print(f"starting the world of {topology}", flush=True)
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "deploy.cli", "up", "--topology", topology,
                 "--state", str(state)],
                cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            yield _edges(process, state / "current.json", log)
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait()


def _edges(process: subprocess.Popen[bytes], current: Path, log: Path) -> list[str]:
    """Once the world is ready. Raises Failed."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError, msgspec.MsgspecError):
            found = msgspec.json.decode(current.read_bytes(), type=_Current)
            return list(found.edges.values())
        time.sleep(0.2)
    raise Failed(f"the world did not come up:\n{log.read_text(errors='replace')[-2000:]}")


def environment() -> dict[str, str]:
    places = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}


if __name__ == "__main__":
    sys.exit(main())
