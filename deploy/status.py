"""`skerry status` and the live line of `skerry up`: what edges and routers say of the world."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx
import msgspec
from rich.console import JustifyMethod
from rich.table import Table

from core.public_tls import SOON_S
from core.status import NodeStatus, RegionStatus
from deploy.calling import edge_client
from deploy.client import AskFailed, unreachable
from deploy.ready import router_view
from deploy.screen import Screen

USUAL_WEIGHT = 100
"""Of a region on the ring; another one is shown."""


class RegionView(msgspec.Struct, frozen=True):
    """A region as an edge knows it: how fresh that is, and what it said last, if anything."""

    name: str
    state: str = ""
    status: RegionStatus | None = None
    round_trip_ms: float = 0.0
    work_s: float = 0.0
    weight: int = USUAL_WEIGHT


class WorkerView(msgspec.Struct, frozen=True):
    """One of an edge's processes."""

    pid: int = 0


class EdgeView(msgspec.Struct, frozen=True):
    """The part of an edge's `/status` that is shown."""

    edge: str = ""
    version: str = ""
    draining: bool = False
    certificate_left_s: float | None = None
    workers: tuple[WorkerView, ...] = ()
    regions: tuple[RegionView, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Sums over all nodes. `generated` counts since the nodes' starts."""

    running: int
    waiting: int
    generated: int
    blocks_used: int
    blocks_total: int


def load_of(nodes: Iterable[NodeStatus]) -> Load:
    nodes = list(nodes)
    return Load(
        running=sum(node.running for node in nodes),
        waiting=sum(node.waiting for node in nodes),
        generated=sum(node.generated_tokens for node in nodes),
        blocks_used=sum(node.blocks_used for node in nodes),
        blocks_total=sum(node.blocks_total for node in nodes),
    )


class LiveLine:
    """One line about the load now; tokens/s over the time since the last one."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None

    def text(self, load: Load, now: float) -> str:
        rate = 0.0
        if self._last is not None and now > self._last[0]:
            # A node that was started again counts from 0: no negative rates.
            rate = max(0, load.generated - self._last[1]) / (now - self._last[0])
        self._last = (now, load.generated)
        share = load.blocks_used / load.blocks_total if load.blocks_total else 0.0
        return (
            f"{load.running} running, {load.waiting} waiting, {rate:.0f} tokens/s, "
            f"KV {share:.0%} in use"
        )


def world_load(client: httpx.Client, routers: Mapping[str, str]) -> Load:
    views = (router_view(client, url) for url in routers.values())
    return load_of(node for view in views if view for node in view.nodes)


def edge_view(base: str) -> EdgeView:
    """Raises AskFailed."""
    try:
        with edge_client(base) as client:
            answer = client.get(f"{base.rstrip('/')}/status")
            answer.raise_for_status()
        return msgspec.json.decode(answer.content, type=EdgeView)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AskFailed(unreachable(base, error)) from error
    except msgspec.MsgspecError as error:
        raise AskFailed(f"{base} is not a Skerry edge: {error}") from error


def first_view(bases: Sequence[str]) -> tuple[str, EdgeView]:
    """Of the first edge that answers, and its URL. Raises AskFailed where none does, of the first
    one."""
    failures: list[AskFailed] = []
    for base in bases:
        try:
            return base, edge_view(base)
        except AskFailed as error:
            failures.append(error)
    raise failures[0]


DAY_S = 86400
REGION_HEADS = ("region", "state", "round-trip", "work", "queued", "KV-used")


def region_lines(view: EdgeView) -> Iterator[str]:
    """What an edge weighs regions by, one line each."""
    weighed = any(region.weight != USUAL_WEIGHT for region in view.regions)
    rows = [(f"from-{view.edge}", *REGION_HEADS[1:], *(["weight"] if weighed else []))]
    for region in view.regions:
        status = region.status
        rows.append(
            (
                region.name,
                region.state,
                f"{region.round_trip_ms:.0f}ms",
                f"{region.work_s:.2f}s",
                str(status.queued) if status else "–",
                f"{status.kv_used:.0%}" if status else "–",
                *([str(region.weight)] if weighed else []),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = zip(row, widths, strict=True)
        yield "  ".join(cell.ljust(width) for cell, width in pairs).rstrip()
    if (left_s := view.certificate_left_s) is not None:
        yield ""
        yield certificate_line(left_s)


def certificate_line(left_s: float) -> str:
    """About the certificate that an edge shows its callers."""
    if left_s <= 0:
        return f"https: the certificate has ended {-left_s / DAY_S:.1f} days ago; renew it"
    soon = "; renew it" if left_s < SOON_S else ""
    return f"https: the certificate is good for {left_s / DAY_S:.1f} days{soon}"


HEADS = ("region", "node", "role", "model", "state", "running", "waiting", "KV blocks",
         "made", "read", "cached")  # fmt: skip
FIRST_NUMBER = HEADS.index("running")
LEFT_OUT_FIRST = ("model", "read", "made", "cached", "waiting", "KV blocks", "role")
"""What goes first when the terminal is narrow."""


def status_rows(regions: Sequence[RegionView]) -> list[tuple[str, ...]]:
    """A row of cells for each node, one for each of its ranks where there are several, one for
    each of its tiers, and one for each region that has no node."""
    rows: list[tuple[str, ...]] = []
    for region in regions:
        nodes = region.status.nodes if region.status else ()
        for node in nodes:
            rows.append(_node_row(region.name, node))
            if len(node.ranks) > 1:
                rows += [
                    _short_row(
                        region.name, f"{node.name}/{one.rank}", "rank", one.part, f"pid {one.pid}"
                    )
                    for one in node.ranks
                ]
            rows += [
                _short_row(
                    region.name, f"{node.name}/{one.kind}", "tier",
                    f"{one.blocks}/{one.places} blocks", one.off or "up",
                )
                for one in node.tiers
            ]  # fmt: skip
        if not nodes:
            rows.append(_short_row(region.name, "–", "–", "–", f"{region.state}, no node"))
    return rows


def _node_row(region: str, node: NodeStatus) -> tuple[str, ...]:
    return (
        region,
        node.name,
        _role(node),
        node.model,
        "draining" if node.draining else "up" if node.alive else "off" if node.off else "lost",
        str(node.running),
        str(node.waiting),
        f"{node.blocks_used}/{node.blocks_total}",
        str(node.generated_tokens),
        str(node.computed_prompt_tokens),
        str(node.cached_prompt_tokens),
    )


def _role(node: NodeStatus) -> str:
    """With its plan where it has several ranks, and whom it shares its place with."""
    plan = [node.plan] if len(node.ranks) > 1 else []
    pool = [f"pool {node.pool}"] if node.pool else []
    return ", ".join([node.role, *plan, *pool])


def _short_row(*cells: str) -> tuple[str, ...]:
    return cells + ("–",) * (len(HEADS) - len(cells))


def status_lines(regions: Sequence[RegionView]) -> Iterator[str]:
    """For a pipe: heads and rows, each cell without blanks, one blank or more between them."""
    rows = [HEADS, *status_rows(regions)]
    cells = [[cell.replace(", ", ",").replace(" ", "_") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        pairs = zip(row, widths, strict=True)
        yield "  ".join(cell.ljust(width) for cell, width in pairs).rstrip()


def status_table(regions: Sequence[RegionView], width: int) -> Table:
    """At most `width` wide where that can be: columns are left out for it, and the table says
    which."""
    rows = status_rows(regions)
    widths = {
        head: max(map(len, (head, *(row[place] for row in rows)))) + 2
        for place, head in enumerate(HEADS)
    }
    hidden: list[str] = []
    for head in LEFT_OUT_FIRST:
        if sum(widths.values()) - 2 <= width:
            break
        del widths[head]
        hidden.append(head)
    table = Table(
        header_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False, caption_justify="left",
        caption=f"left out on {width} columns: {', '.join(hidden)}" if hidden else None,
    )  # fmt: skip
    shown = [place for place, head in enumerate(HEADS) if head in widths]
    for place in shown:
        justify: JustifyMethod = "right" if place >= FIRST_NUMBER else "left"
        table.add_column(HEADS[place], justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(row[place] for place in shown))
    return table


def wait_and_draw(
    client: httpx.Client, routers: Mapping[str, str], screen: Screen, *, period_s: float
) -> None:
    """Draw until interrupted; without a terminal a line is printed when it changes."""
    line, last = LiveLine(), ""
    while True:
        text = line.text(world_load(client, routers), time.monotonic())
        if screen.live:
            screen.draw(f"  {text}")
        elif text != last:
            screen.say(f"  {text}")
        last = text
        time.sleep(period_s)
