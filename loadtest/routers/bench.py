"""The comparison: the second half of a trace through each router that is installed, and the same
requests, cold as well, through our own choice in the simulator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.bench.figures import Figure
from loadtest.routers.doubles import Clock, doubles
from loadtest.routers.peers import RouterFailed, Routers, running
from loadtest.routers.replay import Tally, replay
from loadtest.simulator.measure import summary
from loadtest.simulator.traces import Request
from loadtest.simulator.workloads import WORKLOADS, half_s
from loadtest.simulator.world import EQUAL_TRIP_S, Setup, World

SPEED = 20.0
TRACES = ("conversation", "synthetic")
LATE_S = 4.0
"""A replay that was later than this says nothing: the machine was too busy for it."""
OURS = {"skerry, 16 edges": Setup(), "skerry, 1 edge": Setup(edges=1)}
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    trace: str
    router: str
    tally: Tally


def second_half(trace: str) -> list[Request]:
    requests = WORKLOADS[trace]()
    return [one for one in requests if one.at_s >= half_s(requests)]


def compare(routers: Routers, seed: int, log: Path, say: Say) -> list[Row]:
    rows: list[Row] = []
    if not routers.there:
        return rows
    for trace in TRACES:
        requests = second_half(trace)
        for name, setup in OURS.items():
            rows.append(_told(Row(trace, name, ours(replace(setup, seed=seed), requests)), say))
        for name in routers.there:
            try:
                tally = asyncio.run(
                    _theirs(name, routers, requests, log / f"{name.split(',')[0]}.log")
                )
            except RouterFailed as error:
                say(f"{trace}, {name}: {error}; its output is in {log}")
                continue
            rows.append(_told(Row(trace, name, tally), say))
    return rows


def ours(setup: Setup, requests: Sequence[Request]) -> Tally:
    found = summary(World(setup, "skerry").play(requests))
    return Tally(
        sent=len(requests),
        answered=len(requests) - found.lost,
        hit=found.hit,
        hit_of_infinite=found.hit_of_infinite,
        busiest=found.busiest,
        mean_ttft_s=found.mean_ttft_s,
        p99_ttft_s=found.p99_ttft_s,
        late_s=0.0,
    )


async def _theirs(name: str, routers: Routers, requests: Sequence[Request], log: Path) -> Tally:
    setup, clock = Setup(), Clock(SPEED)
    async with doubles(
        setup.sites, blocks=setup.blocks, tokens_per_s=setup.tokens_per_s, clock=clock
    ) as backends:
        urls = [one.url for one in backends]
        async with running(name, routers.root, urls, SPEED, log) as url:
            tally = await replay(requests, url, backends, clock)
    # Between caller and region there is a round trip in the simulator, none here.
    return replace(
        tally,
        mean_ttft_s=tally.mean_ttft_s + EQUAL_TRIP_S,
        p99_ttft_s=tally.p99_ttft_s + EQUAL_TRIP_S,
    )


def figures(rows: Sequence[Row]) -> Iterator[Figure]:
    """Ours at sixteen edges over the best of the others that the machine could keep up with."""
    for trace in TRACES:
        by_router = {row.router: row.tally for row in rows if row.trace == trace}
        mine = by_router.get("skerry, 16 edges")
        others = {
            name: tally
            for name, tally in by_router.items()
            if name not in OURS and tally.late_s <= LATE_S and tally.answered == tally.sent
        }
        if mine is None or not others:
            continue
        best = max(others, key=lambda name: others[name].hit)
        yield Figure(
            f"{trace}, second half: hit / that of real routers", mine.hit / others[best].hit, "×",
            1.0, 0.95, f"{mine.hit:.3f} against {others[best].hit:.3f} of {best}",
        )  # fmt: skip
        best = min(others, key=lambda name: others[name].mean_ttft_s)
        yield Figure(
            f"{trace}, second half: mean TTFT / that of real routers",
            mine.mean_ttft_s / others[best].mean_ttft_s, "×", 1.0, 1.25,
            f"{mine.mean_ttft_s:.3f} s against {others[best].mean_ttft_s:.3f} of {best}",
        )  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| second half of | router | hit / infinite | busiest / mean | TTFT mean, s | p99"
        " | answered | late p99, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        of = row.tally
        lines.append(
            f"| {row.trace} | {row.router} | {of.hit_of_infinite:.3f} | {of.busiest:.2f}"
            f" | {of.mean_ttft_s:.3f} | {of.p99_ttft_s:.2f} | {of.answered} of {of.sent}"
            f" | {of.late_s:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _told(row: Row, say: Say) -> Row:
    of = row.tally
    say(
        f"{row.trace}, second half, {row.router:28} hit {of.hit_of_infinite:.3f} of infinite,"
        f" busiest {of.busiest:.2f}, TTFT {of.mean_ttft_s:.3f} s mean {of.p99_ttft_s:.2f} p99,"
        f" late {of.late_s:.2f} s p99"
    )
    return row
