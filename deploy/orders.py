"""`skerry drain | undrain | weight`: what an operator orders of a part of a running world."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from core.config import Topology, World, load
from core.errors import ConfigError
from core.headers import SECRET_HEADER
from core.nearest import did_you_mean
from core.orders import ORDERS_PATH, OrderAsk, Orders
from deploy.inside import client, door_urls
from deploy.ready import router_view
from deploy.state import current_of

TIMEOUT = httpx.Timeout(10.0, connect=3.0)
POLL_S = 0.3
AGAIN_S = 8.0
"""For so long one is asked again that is not reached: a router that died is up again by then."""


@dataclass(frozen=True, slots=True)
class Part:
    """An edge, a region or a node, and who takes orders for it. `node` is its name among the
    region's."""

    kind: str
    name: str
    doors: tuple[str, ...]
    region: str = ""

    @property
    def node(self) -> str | None:
        return self.name if self.kind == "node" else None


def running(world: World) -> World:
    """With the addresses that a start on this machine found. Raises ConfigError."""
    current = current_of(world.state)
    if current is None or not current.topology:
        return world  # its processes run elsewhere, at the addresses of the topology
    return load(Path(current.topology), state=world.state)


def part_of(topology: Topology, name: str, older: Mapping[str, str] | None = None) -> Part:
    """`older`: nodes that the topology does not have, with their regions, which have them still.
    Raises ConfigError, with the nearest name."""
    older = {} if older is None else older
    for edge in topology.edges:
        if edge.name == name:
            return Part("edge", name, (edge.url,))
    for region in topology.regions:
        doors = tuple(door_urls(topology, [region]).values())
        if region.name == name:
            return Part("region", name, doors, name)
        if older.get(name) == region.name or any(node.name == name for node in region.nodes):
            return Part("node", name, doors, region.name)
    known = [
        *(edge.name for edge in topology.edges),
        *(region.name for region in topology.regions),
        *(node.name for region in topology.regions for node in region.nodes),
    ]
    known += [one for one in older if one not in known]
    hint = did_you_mean(name, known, f"there are: {', '.join(known)}")
    raise ConfigError(f"nothing is named {name!r}; {hint}")


def drain(
    world: World, name: str, *, resting: bool, say: Callable[[str], None], wait_s: float
) -> None:
    """Let a part rest, or work again; with `wait_s` wait for what it still has. Raises ConfigError
    when it is not done by then."""
    world = running(world)
    part = _meant(world, name)
    ask = OrderAsk(nodes={name: resting}) if part.node else OrderAsk(resting=resting)
    give(world, part, ask, wait_s=AGAIN_S)
    if not resting:
        say(f"{part.kind} {name} takes new work again")
        return
    say(f"{part.kind} {name} gets nothing new; what it has goes on")
    if wait_s:
        wait_until_idle(world, part, say=say, wait_s=wait_s)


def weigh(world: World, name: str, weight: int, *, say: Callable[[str], None]) -> None:
    """Raises ConfigError."""
    world = running(world)
    part = _meant(world, name)
    if part.kind != "region":
        raise ConfigError(f"{name!r} is {_an(part.kind)}; only regions have a weight on the ring")
    give(world, part, OrderAsk(weight=weight), wait_s=AGAIN_S)
    own = world.topology.region(name).weight
    if weight:
        say(f"region {name} has the weight {weight} on every edge's ring (topology: {own})")
    else:
        say(f"region {name} has the topology's weight again: {own}")


def _meant(world: World, name: str) -> Part:
    """Regions are asked about a name that the topology does not have: another unit may have been
    given a newer one. Raises ConfigError."""
    try:
        return part_of(world.topology, name)
    except ConfigError:
        return part_of(world.topology, name, dict(_nodes_there(world)))


def _nodes_there(world: World) -> Iterator[tuple[str, str]]:
    """The nodes that routers have, with their regions."""
    with client(world, timeout=TIMEOUT) as http:
        for region in world.topology.regions:
            for url in door_urls(world.topology, [region]).values():
                view = router_view(http, url)
                yield from ((node.name, region.name) for node in (view.nodes if view else ()))


def give(world: World, part: Part, ask: OrderAsk, *, wait_s: float = 0.0) -> Orders:
    """To all who take orders for the part: of several routers each. Raises ConfigError."""
    with client(world, timeout=TIMEOUT) as http:
        return give_by(http, world, part, ask, wait_s=wait_s)


def give_by(
    http: httpx.Client, world: World, part: Part, ask: OrderAsk, *, wait_s: float = 0.0
) -> Orders:
    """The same over a client of the caller's. Who is not reached is tried again for `wait_s`, and
    keeps the order from nobody else."""
    headers = {SECRET_HEADER: world.secret("region").decode()}
    body = msgspec.json.encode(ask)
    orders = Orders()
    end = time.monotonic() + wait_s
    failed = dict.fromkeys(part.doors, "")
    while True:
        for door in (*failed,):
            try:
                said = http.post(
                    f"{door}{ORDERS_PATH}", content=body, headers=headers, timeout=TIMEOUT
                )
            except httpx.TransportError as error:
                failed[door] = str(error) or type(error).__name__
                continue
            if not said.is_success:
                raise ConfigError(f"{door}: {said.status_code} {reason_of(said)}")
            del failed[door]
            orders = msgspec.json.decode(said.content, type=Orders)
        if not failed:
            return orders
        if time.monotonic() >= end:
            raise ConfigError(_not_reached(part, failed))
        time.sleep(POLL_S)


def _not_reached(part: Part, failed: Mapping[str, str]) -> str:
    where = ", ".join(f"{door} ({why})" for door, why in failed.items())
    said = f"{part.kind} {part.name} is not reached at {where}"
    if len(failed) == len(part.doors):
        return said
    return f"{said}; its other routers have the order: give it again once that one answers"


def wait_until_idle(world: World, part: Part, *, say: Callable[[str], None], wait_s: float) -> None:
    """Raises ConfigError when something still runs after `wait_s`, or who would say so is not
    reached for a while."""
    heard = time.monotonic()
    end = heard + wait_s
    last = -1
    while True:
        try:
            left = sum(_under_way(world, part))
            heard = time.monotonic()
        except ConfigError:
            if time.monotonic() >= heard + AGAIN_S:
                raise
            time.sleep(POLL_S)
            continue
        if not left:
            break
        if left != last:
            say(f"  {left} under way")
            last = left
        if time.monotonic() > end:
            raise ConfigError(f"{part.kind} {part.name} still has {left} after {wait_s:g} s")
        time.sleep(POLL_S)
    say(f"  {part.kind} {part.name} is idle")


class _Node(msgspec.Struct):
    name: str
    running: int = 0
    waiting: int = 0
    prefill_backlog_tokens: int = 0


class _Status(msgspec.Struct):
    in_flight: int = 0
    active: int = 0
    nodes: list[_Node] = []


def _under_way(world: World, part: Part) -> Iterator[int]:
    for door in part.doors:
        try:
            with client(world, timeout=TIMEOUT) as http:
                page = http.get(f"{door}/status").content
        except httpx.TransportError as error:
            raise ConfigError(f"{part.name} is not reached at {door}") from error
        status = msgspec.json.decode(page, type=_Status)
        if part.kind == "edge":
            yield status.in_flight
        elif part.node is None:
            yield status.active
        else:
            for node in status.nodes:
                if node.name == part.node:
                    yield node.running + node.waiting + (node.prefill_backlog_tokens > 0)


def _an(kind: str) -> str:
    return f"an {kind}" if kind == "edge" else f"a {kind}"


def reason_of(said: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(said.content)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return said.text[:200]
