"""The scenario `rolling-deploy`: both regions of a world and then both its edges are replaced while
users stream."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import httpx

from loadtest.users.answers import lines
from loadtest.users.running import LAPTOP, Failed, Running, locust, told_in, world
from loadtest.users.verdicts import SETTLE_S, Check, Deployed, rolling_deploy

USERS = 4
REPLACED_S = 600.0
"""What all of it may take on a slow machine."""


def run(seconds: int) -> list[Check]:
    """`seconds` of users around a deploy that takes as long as it takes."""
    steady_s = max(seconds / 2, 4 * SETTLE_S)
    with tempfile.TemporaryDirectory() as folder, world("two-regions") as running:
        edge = running.urls[0]
        units = [*_regions(edge), *running.edges]
        out, over = Path(folder) / "answers.json", Path(folder) / "over"
        print(f"{USERS} users, {steady_s:.0f} s before and after the deploy of {', '.join(units)}",
              flush=True)  # fmt: skip
        before = processes(running)
        all_s = 2 * steady_s + REPLACED_S
        more = ("--until", str(over))
        with locust(running.urls, all_s, out, users=USERS, more=more) as users:
            time.sleep(steady_s)
            began = time.time()
            for unit in units:
                print(running.skerry("deploy", unit, "--again").rstrip(), flush=True)
            ended = time.time()
            time.sleep(steady_s)
            if users.poll() is not None:
                raise Failed(f"the users were done before the deploy was, after {all_s:.0f} s")
            over.touch()
        after = processes(running)
        told = told_in(out)
    print("\n".join(lines(told.answers, LAPTOP, told.seconds)))
    deployed = Deployed(began - told.began, ended - told.began, before, after)
    return rolling_deploy(told.answers, deployed, told.seconds)


def processes(running: Running) -> dict[str, str]:
    """What tells the present process of each edge, router and node from the one before it."""
    found: dict[str, str] = {}
    with httpx.Client(trust_env=False, timeout=10.0) as client:
        for name, url in running.edges.items():
            page = client.get(f"{url}/status").json()
            found[f"edge {name}"] = str([one["pid"] for one in page["workers"]])
            for region in page["regions"]:
                status = region["status"]
                found[f"router {region['name']}"] = status["epoch"]
                found |= {f"node {node['name']}": str(node["pid"]) for node in status["nodes"]}
    return found


def _regions(edge: str) -> list[str]:
    page = httpx.get(f"{edge}/status", trust_env=False).json()
    return [region["name"] for region in page["regions"]]
