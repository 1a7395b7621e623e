"""What a rollout orders of routers, undone at the next start where the world ended on the way: else
its drains and weights would hold as if the operator had ordered them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from core.config import Region, Topology
from core.errors import ConfigError
from core.orders import OrderAsk, Orders, orders_file, read_orders, write_orders
from deploy.fleet import WorldEnds
from deploy.rollout.plan import Standing, as_it_runs
from deploy.rollout.steps import Kind, Rest, Step, Weigh

FILE = "rollout-orders.json"
Home = Mapping[str, OrderAsk]
"""By router, what leads back from all that is ordered of it."""


def way_home(steps: Sequence[Step], before: Standing, topology: Topology) -> Home:
    """`topology`: also with the regions that are to go. Pure."""
    found: dict[str, OrderAsk] = {}
    for region in topology.regions:
        for door, _ in region.doors:
            ask = _home(steps, region, door, before)
            if ask != OrderAsk():
                found[door] = ask
    return found


def _home(steps: Sequence[Step], region: Region, door: str, before: Standing) -> OrderAsk:
    known = {node.name for one in (region, as_it_runs(region, before)) for node in one.nodes}
    resting: bool | None = None
    weight: int | None = None
    nodes: dict[str, bool] = {}
    for step in steps:
        match step:
            case Rest(Kind.NODE, name) if name in known:
                nodes[name] = name in before.resting
            case Rest(Kind.REGION | Kind.ROUTER as kind, name) if name == (
                region.name if kind is Kind.REGION else door
            ):
                resting = region.name in before.resting
            case Weigh(name) if name == region.name:
                weight = before.weights.get(name, 0)
    return OrderAsk(resting=resting, nodes=nodes, weight=weight)


@contextmanager
def kept_for_the_next_start(state: Path, home: Home) -> Iterator[None]:
    """While a rollout is under way, and after it where the world ends first. Raises OSError."""
    file = state / FILE
    if home:
        fresh = file.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(home))
        os.replace(fresh, file)
    try:
        yield
    except WorldEnds:
        raise
    except ConfigError:  # all has been taken back, or it is said what has not
        file.unlink(missing_ok=True)
        raise
    file.unlink(missing_ok=True)


def undo(state: Path, say: Callable[[str], None]) -> None:
    """Before the routers of a world start: orders of a rollout that did not come to its end hold no
    more. Raises OSError, InternalError where that cannot be written."""
    file = state / FILE
    try:
        home = msgspec.json.decode(file.read_bytes(), type=dict[str, OrderAsk])
    except FileNotFoundError:
        return
    except msgspec.MsgspecError as error:
        say(
            f"{file} is not read ({error}): a rollout was under way when the world ended, and what "
            "it drained may rest still; `skerry undrain NAME` takes that back"
        )
        home = {}
    undone: list[str] = []
    for name, ask in sorted(home.items()):
        kept = orders_file(state, name)
        now = read_orders(kept)
        if (then := now.changed(ask)) != now:
            undone.append(name)
            _keep(kept, then)
    file.unlink()
    if undone:
        say(
            "a rollout was under way when the world ended: what it had ordered of "
            f"{', '.join(undone)} is undone"
        )


def _keep(file: Path, orders: Orders) -> None:
    if orders == Orders():
        file.unlink(missing_ok=True)
    else:
        write_orders(file, orders)
