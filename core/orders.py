"""What an operator orders of a region or an edge while it runs: JSON of `POST /internal/v1/orders`
(`skerry drain | undrain | weight`), and of `POST /internal/v1/topology` (`skerry models add`)."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from core.errors import InternalError

_log = logging.getLogger("skerry.orders")

ORDERS_PATH = "/internal/v1/orders"
TOPOLOGY_PATH = "/internal/v1/topology"
RETIRE = signal.SIGUSR1
"""To an edge of one process: another accepts from the same socket now. Finish what is here, for as
long as it takes, refuse nothing, and end. To a node: take nothing new, finish what is here, for as
long as it takes, and end."""
MOST_WEIGHT = 10_000


class TopologyAsk(msgspec.Struct, frozen=True):
    """To a router: go on with the topology in this file, on its own machine. It reads none but
    those that lie beside the one that it was started with."""

    path: str


class OrderAsk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is to change; what is None stays. `nodes`: by name, whether it rests. `weight` 0 is the
    topology's own again. `leaving`: with `resting`, see `Orders`."""

    resting: bool | None = None
    leaving: bool = False
    nodes: dict[str, bool] = {}
    weight: Annotated[int, msgspec.Meta(ge=0, le=MOST_WEIGHT)] | None = None


class Orders(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What holds now. What rests gets nothing new and ends what it has; a region that is `leaving`
    also what is queued in it, which else waits until it rests no more."""

    resting: bool = False
    leaving: bool = False
    nodes: tuple[str, ...] = ()
    weight: int = 0

    def changed(self, ask: OrderAsk) -> Orders:
        nodes = {name for name in self.nodes if ask.nodes.get(name, True)}
        nodes |= {name for name, rests in ask.nodes.items() if rests}
        return Orders(
            resting=self.resting if ask.resting is None else ask.resting,
            leaving=self.leaving if ask.resting is None else ask.resting and ask.leaving,
            nodes=tuple(sorted(nodes)),
            weight=self.weight if ask.weight is None else ask.weight,
        )


def orders_file(state: Path, name: str) -> Path:
    """Where an edge or a router keeps them, for when it is started again."""
    return state / f"orders-{name}.json"


def read_orders(path: Path) -> Orders:
    """None hold where there is no file, or one that cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Orders)
    except FileNotFoundError:
        return Orders()
    except (OSError, msgspec.MsgspecError) as error:
        _log.warning("%s is not read, no orders hold: %s", path, error)
        return Orders()


def write_orders(path: Path, orders: Orders) -> None:
    """All or nothing. Raises InternalError with the reason, such as a disk that is full."""
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(msgspec.json.encode(orders))
        os.replace(fresh, path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        raise InternalError(f"orders cannot be kept in {path}: {error.strerror}") from error
