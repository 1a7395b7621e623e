"""`make scenarios`: a spike, and the loss of a region, each with a verdict. Worlds of this machine.

The worlds are those of the bundled model with short queues: what cannot be served soon is refused
at once, with the time to come back.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec

from loadtest.users.__main__ import (
    LOCUSTFILE,
    PER_TOKEN_S,
    ROOT,
    TTFT_S,
    Failed,
    environment,
    world,
)
from loadtest.users.answers import Answer, Slo, lines
from loadtest.users.verdicts import Check, region_loss, spike

LIMITS = "\n[limits]\nqueue = 4\nhold = 4\nhold_s = 2.0\n"
USERS = 4
LOSS_SHARE = 0.4
LOOK_S = 0.1
"""Between two looks whether the lost region has a node again."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.users.scenarios", description=__doc__)
    parser.add_argument("names", nargs="*", default=[], help=f"of {', '.join(SCENARIOS)}; all")
    parser.add_argument("--seconds", type=int, default=60, help="of each")
    options = parser.parse_args(argv)
    good = True
    for name in options.names or list(SCENARIOS):
        if name not in SCENARIOS:
            parser.error(f"there is no scenario {name!r}: {', '.join(SCENARIOS)}")
        try:
            checks = SCENARIOS[name](options.seconds)
        except Failed as failure:
            print(failure, file=sys.stderr)
            return 2
        print("\n".join(map(str, checks)))
        good = good and all(check.good for check in checks)
    return 0 if good else 1


def run_spike(seconds: int) -> list[Check]:
    with tempfile.TemporaryDirectory() as folder, world(_topology("local", folder)) as edges:
        answers = _locust(edges, seconds, Path(folder), "--shape", "spike")
    return spike(answers, _SLO, seconds)


def run_region_loss(seconds: int) -> list[Check]:
    at_s = LOSS_SHARE * seconds
    with tempfile.TemporaryDirectory() as folder, world(_topology("two-regions", folder)) as edges:
        victim = _busiest(edges[0])
        over = threading.Event()
        killer = threading.Thread(target=_kill_region, args=(edges[0], victim, at_s, over))
        killer.start()
        try:
            answers = _locust(edges, seconds, Path(folder))
        finally:
            over.set()
            killer.join()
    return region_loss(answers, at_s, victim, seconds)


SCENARIOS: dict[str, Callable[[int], list[Check]]] = {
    "spike": run_spike,
    "region-loss": run_region_loss,
}
_SLO = Slo(ttft_s=TTFT_S, per_token_s=PER_TOKEN_S)


def _topology(name: str, folder: str) -> str:
    """A shipped one with short queues."""
    text = (ROOT / "deploy" / "topologies" / f"{name}.toml").read_text()
    path = Path(folder) / f"{name}.toml"
    path.write_text(text.replace("\n[models.", f"{LIMITS}\n[models.", 1))
    return str(path)


def _locust(edges: Sequence[str], seconds: int, folder: Path, *more: str) -> list[Answer]:
    out = folder / "answers.json"
    print(f"{seconds} s, {USERS} users {' '.join(more)}", flush=True)
    subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless"),
            *("--host", edges[0], "--edges", ",".join(edges), "--users", str(USERS)),
            *("--run-time", f"{seconds}s", "--stop-timeout", "20", "--only-summary"),
            *("--answers", str(out), "--think", "0.5", *more),
        ],
        cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        check=False,
    )  # fmt: skip
    told = json.loads(out.read_text())
    answers = msgspec.convert(told["answers"], list[Answer])
    print("\n".join(lines(answers, _SLO, told["seconds"])))
    return answers


def _busiest(edge: str) -> str:
    """The edge's nearest region: where most of what it is asked goes."""
    regions = httpx.get(f"{edge}/status", trust_env=False).json()["regions"]
    nearest: str = min(regions, key=lambda one: one["round_trip_ms"])["name"]
    return nearest


def _kill_region(edge: str, name: str, after_s: float, over: threading.Event) -> None:
    """Its nodes by SIGKILL, over and over until the test is over: a supervisor starts them again,
    and what comes up may answer until the next look."""
    pause_s = after_s
    with httpx.Client(trust_env=False) as client:
        while not over.wait(pause_s):
            pause_s = LOOK_S
            page = client.get(f"{edge}/status").json()
            (region,) = [one for one in page["regions"] if one["name"] == name]
            for node in (region["status"] or {}).get("nodes", []):
                if node["alive"] and node["pid"]:
                    with suppress(ProcessLookupError):
                        os.kill(node["pid"], signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
