"""`make scenarios`: a spike, the loss of a region, a rolling deploy, a cold model, each with a
verdict. Worlds of this machine.

The worlds are those of the bundled model with short queues: what cannot be served soon is refused
at once, with the time to come back.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from loadtest.users import cold, rolling
from loadtest.users.answers import Answer, lines
from loadtest.users.running import LAPTOP, Failed, locust, needs_locust, shipped, told_in, world
from loadtest.users.verdicts import Check, region_loss, spike

LIMITS = "\n[limits]\nqueue = 4\nhold = 4\nhold_s = 2.0\n"
USERS = 4
LOSS_SHARE = 0.4
LOOK_S = 0.1
"""Between two looks whether the lost region has a node again."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.users.scenarios", description=__doc__)
    parser.add_argument("names", nargs="*", default=[], help=f"of {', '.join(SCENARIOS)}; all")
    parser.add_argument("--seconds", type=int, default=60, help="of each; a deploy takes its time")
    options = parser.parse_args(argv)
    good = True
    for name in options.names or list(SCENARIOS):
        if name not in SCENARIOS:
            parser.error(f"there is no scenario {name!r}: {', '.join(SCENARIOS)}")
        print(f"== {name}", flush=True)
        try:
            needs_locust()
            checks = SCENARIOS[name](options.seconds)
        except Failed as failure:
            print(failure, file=sys.stderr)
            return 2
        print("\n".join(map(str, checks)), flush=True)
        good = good and all(check.good for check in checks)
    return 0 if good else 1


def run_spike(seconds: int) -> list[Check]:
    with tempfile.TemporaryDirectory() as folder, world(_topology("local", folder)) as running:
        answers = _locust(running.urls, seconds, Path(folder), "--shape", "spike")
    return spike(answers, LAPTOP, seconds)


def run_region_loss(seconds: int) -> list[Check]:
    at_s = LOSS_SHARE * seconds
    with (
        tempfile.TemporaryDirectory() as folder,
        world(_topology("two-regions", folder)) as running,
    ):
        edge = running.urls[0]
        victim = _busiest(edge)
        over = threading.Event()
        killer = threading.Thread(target=_kill_region, args=(edge, victim, at_s, over))
        killer.start()
        try:
            answers = _locust(running.urls, seconds, Path(folder))
        finally:
            over.set()
            killer.join()
    return region_loss(answers, at_s, victim, seconds)


SCENARIOS: dict[str, Callable[[int], list[Check]]] = {
    "spike": run_spike,
    "region-loss": run_region_loss,
    "rolling-deploy": rolling.run,
    "cold-model": cold.run,
}


def _topology(name: str, folder: str) -> str:
    """A shipped one with short queues."""
    text = shipped(name)
    path = Path(folder) / f"{name}.toml"
    path.write_text(text.replace("\n[models.", f"{LIMITS}\n[models.", 1))
    return str(path)


def _locust(edges: Sequence[str], seconds: int, folder: Path, *more: str) -> list[Answer]:
    out = folder / "answers.json"
    print(f"{seconds} s, {USERS} users {' '.join(more)}", flush=True)
    with locust(edges, seconds, out, users=USERS, more=more):
        pass
    told = told_in(out)
    print("\n".join(lines(told.answers, LAPTOP, told.seconds)))
    return told.answers


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
