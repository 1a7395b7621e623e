"""The runs of `make bench-routing`, and what they are judged by."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from loadtest.bench.figures import Figure
from loadtest.simulator import decision
from loadtest.simulator.measure import Summary, recovery, summary
from loadtest.simulator.policies import POLICIES
from loadtest.simulator.traces import TRACES
from loadtest.simulator.world import Setup, World

OURS = "skerry"
RIVALS = tuple(name for name in POLICIES if name != OURS)
HIT_MARKS = {"conversation": (0.88, 0.85), "synthetic": (0.94, 0.91), "tenant mix": (0.91, 0.88)}
LOSS = (2, 1500.0, 60.0)
"""The site that is lost, when, and for how long."""
LARGE = Setup(edges=300, sites=20, real_trips=True)
LARGE_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a trace, a world and a policy."""

    trace: str
    place: str
    policy: str
    setup: Setup

    @property
    def name(self) -> str:
        return f"{self.trace}, {self.place}, {self.policy}"


@dataclass(frozen=True, slots=True)
class Played:
    cell: Cell
    summary: Summary
    recovery: float | None
    took_s: float
    """Of one core: whatever else the machine does."""


def cells(seed: int, traces: Sequence[str] = tuple(TRACES)) -> list[Cell]:
    """All runs, the longest first."""
    base = Setup(seed=seed)
    found = [Cell("conversation", "300 × 20", OURS, replace(LARGE, seed=seed))]
    for trace in traces:
        places = {
            "equal round trips": base,
            "even": replace(base, real_trips=True),
            "skewed": replace(base, real_trips=True, skewed=True),
        }
        found += [
            Cell(trace, place, policy, setup)
            for place, setup in places.items()
            for policy in POLICIES
        ]
    found.append(Cell("conversation", "a region lost", OURS, replace(base, fails=LOSS)))
    return found


def play(cell: Cell) -> Played:
    began = time.process_time()
    requests = TRACES[cell.trace]()
    result = World(cell.setup, cell.policy).play(requests)
    back = recovery(result, requests) if cell.setup.fails else None
    return Played(cell, summary(result), back, time.process_time() - began)


def play_all(some: Sequence[Cell], processes: int, say: Callable[[str], None]) -> list[Played]:
    """Each in a process of its own, so that no run sees another's memory."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, maxtasksperchild=4) as pool:
        return [_told(one, say) for one in pool.imap_unordered(play, some)]


def _told(played: Played, say: Callable[[str], None]) -> Played:
    found = played.summary
    say(
        f"{played.cell.name:52} hit {found.hit_of_infinite:.3f} of infinite, busiest"
        f" {found.busiest:.2f}, TTFT {found.mean_ttft_s:.3f} s mean {found.p99_ttft_s:.2f} p99,"
        f" spill {found.spilled:.1%}, {played.took_s:.0f} s"
    )
    return played


def figures(played: Sequence[Played]) -> list[Figure]:
    by_cell = {(one.cell.trace, one.cell.place, one.cell.policy): one for one in played}
    return [
        *_equal(by_cell),
        *_real(by_cell),
        *_loss(by_cell),
        *_large(by_cell),
        _decision(),
    ]


_ByCell = Mapping[tuple[str, str, str], Played]


def _equal(by_cell: _ByCell) -> Iterator[Figure]:
    for trace, (target, floor) in HIT_MARKS.items():
        one = by_cell.get((trace, "equal round trips", OURS))
        if one is None:
            continue
        found = one.summary
        about = f"hit {found.hit:.3f}, {found.moved_keys} keys moved under live conversations"
        yield Figure(
            f"{trace}: hit by tokens against one infinite cache",
            found.hit_of_infinite, "×", target, floor, about,
        )  # fmt: skip
        yield Figure(f"{trace}: busiest region over mean", found.busiest, "×", 1.10, 1.25)


def _real(by_cell: _ByCell) -> Iterator[Figure]:
    for (trace, place, policy), one in by_cell.items():
        if policy != OURS or place not in ("even", "skewed"):
            continue
        rivals = {
            rival: by_cell[trace, place, rival].summary.mean_ttft_s
            for rival in RIVALS
            if (trace, place, rival) in by_cell
        }
        if rivals:
            best = min(rivals, key=lambda rival: rivals[rival])
            ours = one.summary.mean_ttft_s
            about = f"{ours:.3f} s against {rivals[best]:.3f} of {best}"
            name = f"{trace}, {place} load: mean TTFT / best of the others"
            yield Figure(name, ours / rivals[best], "×", 1.0, 1.08, about)


def _loss(by_cell: _ByCell) -> Iterator[Figure]:
    one = by_cell.get(("conversation", "a region lost", OURS))
    if one is None or one.recovery is None:
        return
    about = f"{one.summary.cut} answers that had begun ended in an error event"
    # A target of "none at all" and a floor of the same: written so that smaller is better.
    yield Figure("a region lost for 60 s: requests lost", one.summary.lost, "", 0, 0.5, about)
    yield Figure(
        "a region lost for 60 s: hits a minute after its return / before",
        one.recovery, "×", 0.95, 0.85,
    )  # fmt: skip


def _large(by_cell: _ByCell) -> Iterator[Figure]:
    one = by_cell.get(("conversation", "300 × 20", OURS))
    if one is not None:
        yield Figure(
            "300 edges × 20 regions, whole conversation trace", one.took_s, "s of one core",
            LARGE_LIMIT_S - 60, LARGE_LIMIT_S, f"hit {one.summary.hit:.3f}",
        )  # fmt: skip


def _decision() -> Figure:
    median, p99 = decision.milliseconds()
    return Figure("route decision for a 200 kB prompt", median, "ms", 1.0, 3.0, f"p99 {p99:.2f}")
