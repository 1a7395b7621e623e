"""What a rollout does, step by step. Pure.

An edge is replaced beside itself, on the same socket. A region whose models others serve rests
while it is replaced. One that has no stand-in is replaced node by node and router by router, as far
as it has two of each; for what it has one of, it rests as well, and edges hold its callers. Other
nodes, models and scales a router takes in as it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from core.config import Node, Region, Topology
from core.config_scale import at_first, first_nodes
from core.errors import ConfigError
from core.types import Role
from deploy.rollout.steps import (
    Beside,
    Heard,
    Idle,
    Kind,
    Leave,
    Ready,
    Replace,
    Reread,
    Rest,
    Start,
    Step,
    Stop,
    Watch,
    Weigh,
)
from deploy.topology_diff import Change, changes, rereads, restarts


@dataclass(frozen=True, slots=True)
class Ran:
    """What a process was started from. `release`: its folder."""

    topology: Topology
    release: str


@dataclass(frozen=True, slots=True)
class Standing:
    """The world before. `serving`: regions that edges can use now; `resting`: regions and nodes
    that rest by order; `weights`: of regions, by order, 0 for the topology's; `silent`: regions
    that do not answer; `mute`: routers that do not, of regions that do; `shelved`: the Workers that
    edges serve."""

    processes: Mapping[str, Ran]
    serving: frozenset[str]
    resting: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    mute: frozenset[str] = frozenset()
    shelved: frozenset[str] = frozenset()
    weights: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wish:
    """`unit`: an edge or a region of `topology`. `release` None: what each process runs. `again`:
    also what has not changed. `canary`: the percentage of its weight that the region has for
    `watch_s` before it has all of it."""

    unit: str
    topology: Topology
    release: str | None = None
    again: bool = False
    canary: int | None = None
    watch_s: float = 0.0


def plan(wish: Wish, before: Standing) -> tuple[Step, ...]:
    """Nothing where nothing has changed. Raises ConfigError for a wish that cannot be."""
    topology, unit = wish.topology, wish.unit
    if any(edge.name == unit for edge in topology.edges):
        if wish.canary is not None:
            raise ConfigError(f"{unit!r} is an edge: only regions have a weight for a canary")
        return _edge(wish, before)
    regions = {region.name: region for region in topology.regions}
    if unit not in regions:
        raise ConfigError(f"the topology has neither an edge nor a region {unit!r}")
    if unit not in before.processes:
        raise ConfigError(f"region {unit} does not run")
    return tuple(_region(regions[unit], wish, before))


def affected(names: Collection[str], wish: Wish, before: Standing) -> list[str]:
    """Those of `names` that do not run, or not as wished, in the topology's order."""
    found: list[str] = []
    again = _Once(wish.topology, restarts)
    for name in names:
        ran = before.processes.get(name)
        if (
            ran is None
            or wish.again
            or wish.release not in (None, ran.release)
            or name.partition(".")[0] in again.since(ran)
        ):
            found.append(name)
    return found


class _Once:
    """What `look` finds in the changes to a topology, worked out once for each earlier one."""

    def __init__(
        self, topology: Topology, look: Callable[[list[Change], Topology], list[str]]
    ) -> None:
        self._topology = topology
        self._look = look
        self._found: dict[int, frozenset[str]] = {}

    def since(self, ran: Ran) -> frozenset[str]:
        key = id(ran.topology)
        if key not in self._found:
            found = changes(ran.topology, self._topology)
            self._found[key] = frozenset(self._look(found, self._topology))
        return self._found[key]


def names_in(steps: Sequence[Step]) -> set[str]:
    """Of all processes that the steps start or stop."""
    found = {name for step in steps if isinstance(step, Replace) for name in step.names}
    found |= {step.edge for step in steps if isinstance(step, Beside | Leave)}
    return found | {step.name for step in steps if isinstance(step, Start | Stop)}


def has_stand_in(region: Region, before: Standing, wished: Topology) -> bool:
    """Whether every request that `region` gets may be served by another one that serves now: as
    edges and regions run, each from its own topology. What `before` does not know of runs as
    `wished`."""
    others = [
        as_it_runs(one, before)
        for one in wished.regions
        if one.name in before.serving and one.name != region.name
    ]
    rules = [
        ran.topology
        for name, ran in before.processes.items()
        if any(edge.name == name for edge in ran.topology.edges)
    ] or [wished]
    for model in {node.model for node in region.nodes}:
        able = {one.name for one in others if _decodes(one, model, before)}
        allowed = [
            set(names)
            for topology in rules
            for names in _residencies(topology, model)
            if names and region.name in names
        ]
        if not able or any(not able & names for names in allowed):
            return False
    return True


def as_it_runs(region: Region, before: Standing) -> Region:
    """Which may be otherwise than it is described."""
    ran = before.processes.get(region.name)
    return region if ran is None else ran.topology.region(region.name)


def _decodes(region: Region, model: str, before: Standing) -> bool:
    return any(
        node.model == model and node.role is not Role.PREFILL and node.name not in before.resting
        for node in region.nodes
    )


def _residencies(topology: Topology, model: str) -> Iterator[tuple[str, ...]]:
    if model in topology.models:
        yield topology.models[model].residency
    yield from topology.residency.values()
    yield from (tenant.regions for tenant in topology.tenants.values())


def _edge(wish: Wish, before: Standing) -> tuple[Step, ...]:
    edge = wish.unit
    if edge not in before.processes:
        raise ConfigError(f"edge {edge} does not run")
    if not affected([edge], wish, before):
        return ()
    return (Beside(edge),)


def retold(region: Region, wish: Wish, before: Standing) -> tuple[Step, ...]:
    """For a region that stays while others come or go: its routers are told, and the nodes that
    they do not know any more are seen off."""
    return (*_told(region, wish, before), *_gone(region, before))


def mute_of(region: Region, before: Standing) -> tuple[str, ...]:
    """The routers of `region` that do not answer, which are done without."""
    silent = region.name in before.silent
    return tuple(name for name, _ in region.doors if silent or name in before.mute)


def _told(
    region: Region, wish: Wish, before: Standing, but: Collection[str] = ()
) -> tuple[Step, ...]:
    """The routers that go on with what has changed, less those that are replaced (`but`)."""
    news = _Once(wish.topology, rereads)
    mute = mute_of(region, before)
    return tuple(
        Reread(name, mute=name in mute)
        for name, _ in region.doors
        if name not in but and region.name in news.since(before.processes[name])
    )


def _region(region: Region, wish: Wish, before: Standing) -> Iterator[Step]:
    routers = [name for name, _ in region.doors]
    found = affected([*routers, *(node.name for node in region.nodes)], wish, before)
    yield from _told(region, wish, before, found)
    anew = not set(routers).isdisjoint(found)  # such a router does not know who goes
    if anew:
        yield from _gone(region, before)
    if found:
        yield from _found(found, region, wish, before)
    if not anew:
        yield from _gone(region, before)


def _found(found: Collection[str], region: Region, wish: Wish, before: Standing) -> Iterator[Step]:
    """What is to be started, or started again."""
    routers = [name for name, _ in region.doors]
    fresh = [name for name in found if name not in before.processes]
    changed = [name for name in found if name in before.processes]
    nodes = [node for node in region.nodes if node.name in changed]
    doors = [name for name in routers if name in changed]
    mute = mute_of(region, before)
    one_by_one: list[str] = []
    alone = not has_stand_in(as_it_runs(region, before), before, wish.topology)
    if alone and wish.canary is not None:
        raise ConfigError(
            f"a canary needs another region that can take what region {region.name} does not get"
        )
    if alone:
        if len(routers) > 1:  # first who does not answer: until then another has all the work
            one_by_one += [name for name in doors if name in mute]
        one_by_one += [node.name for node in nodes if _stands_in(node, region, before)]
        if len(routers) > 1:
            one_by_one += [name for name in doors if name not in mute]
    for name in one_by_one:
        yield from _singly(name, Kind.ROUTER if name in routers else Kind.NODE, mute, before)
    together = [name for name in (*doors, *(n.name for n in nodes)) if name not in one_by_one]
    yield from _together(region, together, fresh, wish, before)


def _gone(region: Region, before: Standing) -> Iterator[Step]:
    """Nodes that the region had and is not to have any more."""
    mute = mute_of(region, before)
    staying = {node.name for node in region.nodes}
    had = before.processes[region.name].topology.region(region.name).nodes
    for name in (node.name for node in had):
        if name not in staying and name in before.processes:
            yield Rest(Kind.NODE, name, True, but=mute)
            yield Idle(Kind.NODE, name, but=mute)
            yield Stop(name)


def _singly(name: str, kind: Kind, mute: tuple[str, ...], before: Standing) -> Iterator[Step]:
    if name not in mute:
        yield Rest(kind, name, True, but=mute)
        yield Idle(kind, name, but=mute)
    yield Replace((name,))
    yield Ready((name,), but=mute)
    if name not in before.resting and name not in mute:
        yield Rest(kind, name, False, but=mute)


def _together(
    region: Region, names: Sequence[str], fresh: Sequence[str], wish: Wish, before: Standing
) -> Iterator[Step]:
    name, mute = region.name, mute_of(region, before)
    if names:
        yield Rest(Kind.REGION, name, True, but=mute)
        yield Idle(Kind.REGION, name, but=mute)
        yield Replace(tuple(names))
    off = {node.name for node in region.nodes} - {
        node.name for node in first_nodes(region, at_first(region), before.resting)
    }
    for one in fresh:
        yield Start(one, later=one in off)
    if up := (*names, *(one for one in fresh if one not in off)):
        yield Ready(up, but=mute)
    yield Heard(name)
    own = before.weights.get(name, 0)
    if wish.canary is not None:
        full = own or region.weight
        yield Weigh(name, max(1, round(full * wish.canary / 100)), but=mute)
    if names and name not in before.resting:
        yield Rest(Kind.REGION, name, False, but=mute)
    if wish.canary is not None:
        yield Watch(name, wish.watch_s)
        yield Weigh(name, own, but=mute)


def _stands_in(node: Node, region: Region, before: Standing) -> bool:
    """Whether another node of the region can do what this one does, meanwhile. What reads prompts
    can be done without by nodes that decode."""
    others = [
        one
        for one in region.nodes
        if one.name != node.name
        and one.model == node.model
        and one.name in before.processes
        and one.name not in before.resting
    ]
    return any(one.role is not Role.PREFILL for one in others)
