"""From played cells to figures with a target, a floor and a verdict: pure, but for `_decision`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean

from loadtest.bench.figures import Figure
from loadtest.simulator import decision
from loadtest.simulator.bench import EQUAL, EVEN, GOSSIP, LARGE, LOST, OURS, RIVALS, SKEWED, Played
from loadtest.simulator.measure import Summary
from loadtest.simulator.workloads import HELD_OUT, TUNED_ON

HIT_MARKS = {"conversation": (0.88, 0.85), "synthetic": (0.94, 0.91), "tenant mix": (0.91, 0.88)}
LARGE_LIMIT_S = 180.0
HELD = " (held out)"
"""Marks figures of requests that no constant was tuned on."""

ByCell = Mapping[tuple[str, str, str], Played]
Part = Callable[[Played], Summary]


def figures(played: Sequence[Played]) -> list[Figure]:
    by_cell = by_name(played)
    return [
        *_equal(by_cell),
        *_real(by_cell),
        *_loss(by_cell),
        *_large(by_cell),
        _decision(),
    ]


def by_name(played: Sequence[Played]) -> ByCell:
    return {(one.cell.trace, one.cell.place, one.cell.policy): one for one in played}


def best_rival(by_cell: ByCell, trace: str, place: str, part: Part) -> tuple[str, float] | None:
    """(policy, its mean time to the first token) of the best that is not ours."""
    rivals = {
        rival: part(by_cell[trace, place, rival]).mean_ttft_s
        for rival in RIVALS
        if (trace, place, rival) in by_cell
    }
    return min(rivals.items(), key=lambda pair: pair[1]) if rivals else None


def parts() -> Iterator[tuple[str, str, Part]]:
    """(name, workload, part of it), those that the constants were tuned on left out."""
    for trace in TUNED_ON:
        yield f"{trace}, second half{HELD}", trace, second
    for trace in HELD_OUT:
        yield trace + HELD, trace, whole


def whole(one: Played) -> Summary:
    return one.whole


def first(one: Played) -> Summary:
    return one.first


def second(one: Played) -> Summary:
    return one.second


def _all_parts() -> Iterator[tuple[str, str, Part]]:
    yield from ((trace, trace, whole) for trace in TUNED_ON)
    yield from parts()


def _equal(by_cell: ByCell) -> Iterator[Figure]:
    for name, trace, part in _all_parts():
        one = by_cell.get((trace, EQUAL, OURS))
        if one is None:
            continue
        found = part(one)
        marks = HIT_MARKS.get(trace.partition(",")[0])
        if marks is None:
            continue  # a made workload has no marks of its own: its rivals judge it
        about = f"hit {found.hit:.3f}, {found.moved_keys} keys moved under live conversations"
        yield Figure(
            f"{name}: hit by tokens against one infinite cache",
            found.hit_of_infinite, "×", *marks, about,
        )  # fmt: skip
        yield Figure(f"{name}: busiest region over mean", found.busiest, "×", 1.10, 1.25)


def _real(by_cell: ByCell) -> Iterator[Figure]:
    for name, trace, part in _all_parts():
        for place in (EVEN, SKEWED):
            ours = by_cell.get((trace, place, OURS))
            best = best_rival(by_cell, trace, place, part)
            if ours is None or best is None:
                continue
            rival, theirs_s = best
            ours_s = part(ours).mean_ttft_s
            about = f"{ours_s:.3f} s against {theirs_s:.3f} of {rival}"
            figure = f"{name}, {place} load: mean TTFT / best of the others"
            yield Figure(figure, ours_s / theirs_s, "×", 1.0, 1.08, about)


def _loss(by_cell: ByCell) -> Iterator[Figure]:
    one = by_cell.get(("conversation", LOST, OURS))
    if one is None or not one.losses:
        return
    cut = sum(loss.cut for loss in one.losses)
    about = f"{cut} answers that had begun ended in an error event"
    lost = sum(loss.lost for loss in one.losses)
    each = f"each of {len(one.losses)} regions lost once for 60 s"
    # A target of "none at all" and a floor of the same: written so that smaller is better.
    yield Figure(f"{each}: requests lost", lost, "", 0, 0.5, about)
    before = [loss.recovery.of_before for loss in one.losses]
    undisturbed = [loss.recovery.of_undisturbed for loss in one.losses]
    yield Figure(
        f"{each}: hits a minute after its return / before",
        mean(before), "×", 0.95, 0.85, f"{min(before):.3f} to {max(before):.3f}",
    )  # fmt: skip
    yield Figure(
        f"{each}: the same / those minutes of a world that lost nothing",
        mean(undisturbed), "×", 0.95, 0.85, f"{min(undisturbed):.3f} to {max(undisturbed):.3f}",
    )  # fmt: skip


def _large(by_cell: ByCell) -> Iterator[Figure]:
    one = by_cell.get(("conversation", LARGE, OURS))
    if one is None:
        return
    yield Figure(
        "300 edges × 20 regions, whole conversation trace", one.took_s, "s of one core",
        LARGE_LIMIT_S - 60, LARGE_LIMIT_S, f"hit {one.whole.hit:.3f}",
    )  # fmt: skip
    knowing = by_cell.get(("conversation", GOSSIP, OURS))
    if knowing is not None:
        yield Figure(
            "300 edges that do not hear each other: hit / that of edges that do",
            one.whole.hit / knowing.whole.hit, "×", 0.99, 0.97,
            f"mean TTFT {one.whole.mean_ttft_s:.3f} s against {knowing.whole.mean_ttft_s:.3f}",
        )  # fmt: skip


def _decision() -> Figure:
    median, p99 = decision.milliseconds()
    return Figure("route decision for a 200 kB prompt", median, "ms", 1.0, 3.0, f"p99 {p99:.2f}")
