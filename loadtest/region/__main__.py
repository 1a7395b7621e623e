"""`python -m loadtest.region`: what the router of a region is good for, on the bundled model.

Whether a conversation's next turn finds what the last one left, what splitting spares those whose
answers are being written, and how many tokens a second one router process passes on. Takes about
three minutes; needs two cores that have nothing else to do. Exit status: 0, 1 when a figure is
below its floor, 2 when a process did not come up.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from loadtest.bench import chart, probe, report
from loadtest.bench.__main__ import BELOW_FLOOR, NOT_MEASURED, PROJECT, say
from loadtest.bench.figures import Figure
from loadtest.bench.timing import median
from loadtest.edge.cast import NotStarted
from loadtest.region import passing, splitting, turns
from loadtest.region.asking import AskFailed

PARTS = ("turns", "split", "router")


@dataclass(frozen=True, slots=True)
class Size:
    conversations: int
    turns: int
    prompts: int
    budgets: tuple[int, ...]
    tokens: int
    rounds: int


FULL = Size(40, 5, 6, splitting.BUDGETS, 1500, 3)
QUICK = Size(12, 4, 3, (16, 64), 400, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    size = QUICK if options.quick else FULL
    say(f"machine: {probe.describe()}")
    found: list[Figure] = []
    measures = {"turns": turn_figures, "split": split_figures, "router": router_figures}
    try:
        for part in options.only or PARTS:
            found += measures[part](size)
    except (NotStarted, AskFailed, OSError) as error:
        say(f"{error}")
        return NOT_MEASURED
    return write(found)


def turn_figures(size: Size) -> list[Figure]:
    say(f"{size.conversations} conversations of {size.turns} turns over {turns.NODES} nodes, twice")
    placed, at_random = turns.measure(conversations=size.conversations, turns=size.turns)
    for name, one in (("placed", placed), ("at random", at_random)):
        told = ", ".join(f"{kind} {tokens}" for kind, tokens in one.prompts.items())
        say(f"  {name}: first token after {one.mean_s:.3f} s in the mean; prompt tokens: {told}")
    delivered = placed.prompts["delivered"] / max(1, placed.prompts["reusable"])
    about = f"{placed.mean_s:.3f} s against {at_random.mean_s:.3f} s"
    ratio = placed.mean_s / at_random.mean_s
    return [
        Figure("multi-turn replay: delivered / reusable tokens", delivered, "×", 0.95, 0.9),
        Figure("multi-turn replay: TTFT / random placement's", ratio, "×", 0.5, 0.65, about),
    ]


def split_figures(size: Size) -> list[Figure]:
    say(
        f"{splitting.STREAMS} streams while {size.prompts} prompts of {splitting.PROMPT_TOKENS}"
        f" tokens are read, {splitting.AT_ONCE} at once"
    )
    split = splitting.split(size.prompts)
    say(split.line())
    if split.split < size.prompts:
        say(f"  only {split.split} of {size.prompts} prompts were split off")
    together = []
    for budget in size.budgets:
        together.append(splitting.combined(budget, size.prompts))
        say(together[-1].line())
    rival = splitting.best(together, split.prompt_tokens_per_s)
    about = (
        f"{split.p99_ms:.0f} ms against {rival.p99_ms:.0f} ms of {rival.name}; prompts at"
        f" {split.prompt_tokens_per_s:,.0f} and {rival.prompt_tokens_per_s:,.0f} tok/s, first token"
        f" after {split.ttft_s:.2f} and {rival.ttft_s:.2f} s"
    )
    name = "streams' p99 time per token while prompts come: split / combined"
    return [Figure(name, split.p99_ms / rival.p99_ms, "×", 0.5, 0.7, about)]


def router_figures(size: Size) -> list[Figure]:
    count = passing.NODES * passing.SEQUENCES
    say(f"{count} sequences of {passing.NODES} scripted nodes through one router, at full speed")
    found = passing.measure(tokens=size.tokens, rounds=size.rounds)
    tokens_per_s = median([one.tokens_per_s for one in found])
    cpu_us = median([one.cpu_us for one in found])
    about = f"{cpu_us:.1f} µs of the router's CPU a token"
    return [
        Figure("tokens a second through a router", tokens_per_s, "tok/s", 40_000, 20_000, about)
    ]


def write(found: Sequence[Figure]) -> int:
    arguments = f" ARGS={shlex.quote(shlex.join(sys.argv[1:]))}" if sys.argv[1:] else ""
    command = f"make bench-region{arguments}"
    versions = {
        "python": platform.python_version(),
        "grpcio": metadata.version("grpcio"),
        "aiohttp": metadata.version("aiohttp"),
    }
    machine = probe.describe()
    build = PROJECT / "build" / "bench"
    build.mkdir(parents=True, exist_ok=True)
    panels = [
        (one.name, {"measured": one.value, "target": one.target, "floor": one.floor})
        for one in found
    ]
    files: dict[Path, bytes] = {
        build / "region.json": report.as_json(command, machine, versions, found),
        build / "region.svg": chart.svg("One region", machine, panels, "measured").encode(),
    }
    for path, data in files.items():
        path.write_bytes(data)
    say("\n" + report.markdown(command, machine, versions, found, {}))
    say("written: " + ", ".join(os.path.relpath(path) for path in files))
    return BELOW_FLOOR if any(figure.fails for figure in found) else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-region", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts alone")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
