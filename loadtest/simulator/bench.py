"""The runs of `make bench-routing`, one cell each."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loadtest.simulator.measure import Recovery, Summary, recovery, summary
from loadtest.simulator.policies import POLICIES
from loadtest.simulator.workloads import HELD_OUT, TUNED_ON, WORKLOADS, half_s
from loadtest.simulator.world import Setup, World

OURS = "skerry"
RIVALS = tuple(name for name in POLICIES if name != OURS)
EQUAL, EVEN, SKEWED = "equal round trips", "even", "skewed"
LARGE, LOST = "300 × 20", "a region lost"
GOSSIP = "300 × 20, all-knowing"
"""Each edge knows at once what every other sends where."""
LOSSES = tuple((site, 1800.0 + 140.0 * site, 60.0) for site in range(8))
"""Which site is lost, when, and for how long: each once, all in the held-out half."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a workload, a world and a policy; with `losses`, one run for each of them too."""

    trace: str
    place: str
    policy: str
    setup: Setup
    losses: tuple[tuple[int, float, float], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.trace}, {self.place}, {self.policy}"


@dataclass(frozen=True, slots=True)
class Loss:
    lost: int
    cut: int
    recovery: Recovery


@dataclass(frozen=True, slots=True)
class Played:
    """`first` and `second`: of the two halves of the trace's time."""

    cell: Cell
    whole: Summary
    first: Summary
    second: Summary
    losses: tuple[Loss, ...]
    took_s: float
    """Of one core: whatever else the machine does."""


def cells(seed: int, traces: Sequence[str] = tuple(WORKLOADS)) -> list[Cell]:
    """All runs, the longest first."""
    base = Setup(seed=seed)
    large = replace(base, edges=300, sites=20, real_trips=True)
    places = {
        EQUAL: base,
        EVEN: replace(base, real_trips=True),
        SKEWED: replace(base, real_trips=True, skewed=True),
    }
    found = [
        Cell("conversation", LOST, OURS, base, LOSSES),
        Cell("conversation", LARGE, OURS, large),
        Cell("conversation", GOSSIP, OURS, replace(large, gossip=True)),
    ]
    for trace in traces:
        for place, setup in places.items():
            if trace in HELD_OUT and place == SKEWED:
                continue  # two places of three tell what there is to tell
            policies = POLICIES if trace in TUNED_ON or place == EVEN else (OURS,)
            found += [Cell(trace, place, policy, setup) for policy in policies]
    return found


def play(cell: Cell) -> Played:
    began = time.process_time()
    requests = WORKLOADS[cell.trace]()
    result = World(cell.setup, cell.policy).play(requests)
    took_s = time.process_time() - began
    losses = []
    for fails in cell.losses:
        lost = World(replace(cell.setup, fails=fails), cell.policy).play(requests)
        told = summary(lost)
        losses.append(Loss(told.lost, told.cut, recovery(lost, result)))
    half = half_s(requests)
    return Played(
        cell,
        summary(result),
        summary(result, until_s=half),
        summary(result, since_s=half),
        tuple(losses),
        took_s,
    )


def play_all(some: Sequence[Cell], processes: int, say: Callable[[str], None]) -> list[Played]:
    """Each in a process of its own, so that no run sees another's memory."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, maxtasksperchild=4) as pool:
        return [_told(one, say) for one in pool.imap_unordered(play, some)]


def _told(played: Played, say: Callable[[str], None]) -> Played:
    found = played.whole
    say(
        f"{played.cell.name:52} hit {found.hit_of_infinite:.3f} of infinite, busiest"
        f" {found.busiest:.2f}, TTFT {found.mean_ttft_s:.3f} s mean {found.p99_ttft_s:.2f} p99,"
        f" spill {found.spilled:.1%}, {played.took_s:.0f} s"
    )
    return played
