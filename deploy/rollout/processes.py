"""Every process of a world with its release and health, for `skerry status`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from core.status import NodeStatus
from deploy.rollout.messages import Seen
from deploy.status import EdgeView, RegionView

HEADS = ("process", "kind", "health", "release", "pid", "up", "from")
SILENT = "does not answer"
_UNKNOWN = "–"


def process_lines(
    view: EdgeView, seen: Sequence[Seen], silent: Collection[str] = ()
) -> Iterator[str]:
    """What an edge knows, and what the launcher says where the world runs on this machine (`seen`).
    Distant edges other than the one that is asked are not in it. `silent`: edges and routers that
    were asked and did not answer."""
    rows = [HEADS, *_rows(view, {one.name: one for one in seen}, silent)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = zip(row, widths, strict=True)
        yield "  ".join(cell.ljust(width) for cell, width in pairs).rstrip()


def _rows(
    view: EdgeView, seen: Mapping[str, Seen], silent: Collection[str]
) -> Iterator[tuple[str, ...]]:
    shown: set[str] = set()

    def row(name: str, kind: str, health: str, release: str) -> tuple[str, ...]:
        shown.add(name)
        here = seen.get(name)
        if name in silent:
            health = SILENT
        if here is None:
            return (name, kind, health, release or _UNKNOWN, *(_UNKNOWN,) * 3)
        made_from = f"{Path(here.folder).name}, {Path(here.topology).stem}"
        return (
            name, kind, f"down, {here.ended}" if here.ended else health, here.release,
            str(here.pid), _span(here.up_s), made_from,
        )  # fmt: skip

    if view.edge:
        yield row(view.edge, "edge", "draining" if view.draining else "up", view.version)
    for one in seen.values():
        if one.kind == "edge" and one.name not in shown:
            yield row(one.name, "edge", "up", one.release)
    for region in view.regions:
        status = region.status
        yield row(region.name, "router", _health(region), status.release if status else "")
        for one in seen.values():
            if one.kind == "router" and one.name.startswith(f"{region.name}."):
                yield row(one.name, "router", "up", one.release)
        for node in status.nodes if status else ():
            health = "starting" if node.off and node.name in seen else _node_health(node)
            yield row(node.name, "node", health, node.release)
    for one in seen.values():
        if one.name not in shown:
            yield row(one.name, one.kind, "not heard", one.release)


def _health(region: RegionView) -> str:
    if region.state != "fresh":
        return region.state
    return "draining" if region.status is not None and region.status.draining else "up"


def _node_health(node: NodeStatus) -> str:
    if not node.alive:
        return "off" if node.off else "lost"
    return "draining" if node.draining else "up"


def _span(seconds: float) -> str:
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{seconds:.0f}s"
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
