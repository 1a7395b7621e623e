"""`python -m loadtest.simulator.tune`: one weight at a time, on the first half of each trace alone.

Prints, for each value, the mean time to the first token over that of the weights as they are
(geometric mean over traces and places), the mean hit ratio against one infinite cache, the worst
busiest region, and what a lost region has regained a minute after its return. It changes nothing:
`edge/routing/weights.py` is written by hand. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from edge.routing.weights import WEIGHTS, Weights
from loadtest.simulator.measure import recovery, summary
from loadtest.simulator.policies import Rules
from loadtest.simulator.workloads import TUNED_ON, half_s
from loadtest.simulator.world import Setup, World

PLACES = {
    "equal": Setup(),
    "even": Setup(real_trips=True),
    "skewed": Setup(real_trips=True, skewed=True),
}
LOSS = (2, 900.0, 60.0)
FACTORS = (0.5, 2.0)


@dataclass(frozen=True, slots=True)
class Judged:
    """One set of weights. `ttft_s` by trace and place."""

    weights: Weights
    ttft_s: dict[tuple[str, str], float]
    hit: float
    busiest: float
    regained: float


def judge(weights: Weights) -> Judged:
    ttft_s, hits, busiest, regained = {}, [], [], math.nan
    for trace, load in TUNED_ON.items():
        whole = load()
        requests = [one for one in whole if one.at_s < half_s(whole)]
        for place, setup in PLACES.items():
            ours = replace(setup, rules=Rules(weights=weights))
            result = World(ours, "skerry").play(requests)
            found = summary(result)
            ttft_s[trace, place] = found.mean_ttft_s
            if place == "equal":
                hits.append(found.hit_of_infinite)
                busiest.append(found.busiest)
            if (trace, place) == ("conversation", "equal"):
                lost = World(replace(ours, fails=LOSS), "skerry").play(requests)
                regained = recovery(lost, result).of_undisturbed
    return Judged(weights, ttft_s, sum(hits) / len(hits), max(busiest), regained)


def variations(names: Sequence[str]) -> Iterator[Weights]:
    yield WEIGHTS
    for name in names:
        value = getattr(WEIGHTS, name)
        for factor in FACTORS:
            yield replace(WEIGHTS, **{name: value * factor})


def line(one: Judged, base: Judged) -> str:
    logs = [math.log(one.ttft_s[cell] / base.ttft_s[cell]) for cell in base.ttft_s]
    changed = [
        f"{of.name} = {getattr(one.weights, of.name):g}"
        for of in fields(Weights)
        if getattr(one.weights, of.name) != getattr(base.weights, of.name)
    ]
    return (
        f"{', '.join(changed) or 'as they are':24} TTFT {math.exp(sum(logs) / len(logs)):.4f}"
        f"  hit {one.hit:.4f}  busiest {one.busiest:.3f}  regained {one.regained:.3f}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    names = [of.name for of in fields(Weights)]
    parser = argparse.ArgumentParser(prog="python -m loadtest.simulator.tune", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        judged = pool.imap(judge, variations(options.only))
        base = next(judged)
        sys.stdout.write(line(base, base))
        for one in judged:
            sys.stdout.write(line(one, base))
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
