"""`skerry models list`: which models the regions serve, and how many nodes each has and should
have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core.status import ModelStatus, RegionStatus, Wanted
from deploy.explain import aligned
from deploy.status import RegionView

HEADS = ("model", "region", "state", "role", "up", "wanted", "why", "pool")


def scales(regions: Sequence[RegionView]) -> bool:
    """Whether any of them starts and stops nodes."""
    return any(region.status is not None and region.status.more.wanted for region in regions)


def model_lines(regions: Sequence[RegionView]) -> Iterator[str]:
    """A line for each model, region and role; cells without blanks."""
    rows = sorted(row for one in regions if one.status for row in _rows(one.status))
    return aligned([HEADS, *rows], len(HEADS))


def _rows(status: RegionStatus) -> Iterator[tuple[str, ...]]:
    known = {one.name: one for one in status.models}
    wanted = {(one.model, one.role): one for one in status.more.wanted}
    for model, role in dict.fromkeys((node.model, node.role) for node in status.nodes):
        nodes = [node for node in status.nodes if (node.model, node.role) == (model, role)]
        one, want = known.get(model), wanted.get((model, role))
        yield (
            model,
            status.region,
            _state(one, want),
            role,
            f"{sum(node.alive for node in nodes)}/{len(nodes)}",
            str(want.nodes) if want else "all",
            want.why if want else "–",
            ",".join(dict.fromkeys(node.pool for node in nodes if node.pool)) or "–",
        )


def _state(one: ModelStatus | None, want: Wanted | None) -> str:
    if one is None:
        return "out"
    if one.start_s and want is not None and want.no_place and want.waiting:
        return "waits-for-a-place"
    return f"cold,~{one.start_s:.1f}s" if one.start_s else "warm"
