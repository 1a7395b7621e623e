"""Starts and stops a world's nodes after the numbers that its routers want.

A thread asks each router that scales something, ten times a second: a cold request waits for it.
Which nodes those numbers are, and whose turn it is where several share a place, `core.pools`
decides. A node that is not needed takes nothing new, ends what it has, and goes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx
import psutil

from core.config import Node, Region, World
from core.errors import ConfigError
from core.pools import Claim, Key, Leave, Seat, State, decide
from core.status import Wanted
from deploy.fleet import Fleet, offspring, runs_on
from deploy.inside import client as client_of
from deploy.inside import door_urls
from deploy.process import Process, Spec
from deploy.ready import RouterView, router_view

LOOK_S = 0.1
ASK_S = 1.0
LATE_S = 30.0
"""A node that was asked to go, and that no router has seen since, is taken down after this; one
that answers has the longest that an answer may take, and this."""


@contextmanager
def scaled(
    world: Callable[[], World], fleet: Fleet, spec: Callable[[str], Spec], *,
    say: Callable[[str], None], revive: bool,
) -> Iterator[None]:  # fmt: skip
    """Inside, the numbers are followed. `world`: as it runs now; `spec`: how a process is started
    now; `revive`: whether one that ends by itself is started again."""
    over = threading.Event()
    numbers = Numbers(fleet, spec, say=say, revive=revive)

    def follow() -> None:
        with client_of(world()) as client:
            while not over.wait(LOOK_S):
                now = world()
                for region in now.topology.regions:
                    if region.scale:
                        views = _views(client, now, region)
                        numbers.follow(region, views, now.topology.limits.deadline_s)

    thread = threading.Thread(target=follow, name="scaling")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class Sight:
    """What the routers say of a node, taken together."""

    alive: bool = False
    draining: bool = False
    placed: int = 0
    idle_s: float = 0.0


@dataclass(slots=True)
class _Known:
    """A node's process as it was followed. `since`: its present state; `seen`: by a router, or
    started; `born`: the process that was looked at last."""

    since: float
    seen: float
    born: float
    up: bool = False
    falls: int = 0
    told: bool = False
    """That it is up was said, or is not to be."""


@dataclass(slots=True)
class _Leaving:
    """Asked to go. `family`: what it has started, which holds memory as well."""

    process: Process
    since: float
    family: Sequence[psutil.Process] = field(default_factory=tuple)


class Numbers:
    """What was started and asked to end, and is not there or gone yet. `clock`: monotonic."""

    def __init__(
        self,
        fleet: Fleet,
        spec: Callable[[str], Spec],
        *,
        say: Callable[[str], None],
        revive: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._spec = spec
        self._say = say
        self._revive = revive
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._leaving: dict[str, _Leaving] = {}
        self._off_since: dict[str, float] = {}

    def follow(self, region: Region, views: Sequence[RouterView], deadline_s: float = 0.0) -> None:
        """Start and stop what `region` needs by what its routers say; where one sees more to do
        than another, it is heard. `deadline_s`: no answer lasts longer."""
        sights = sights_of(region, views)
        wanted = merged(one for view in views for one in view.more.wanted)
        for name, sight in sights.items():
            if name in self._leaving:
                self._see_off(name, sight, deadline_s)
        if not views:
            return  # nothing is known of anybody: what is remembered of turns stays
        for node in region.nodes:
            if (node.model, node.role) in wanted:
                self._give_up(node, wanted[node.model, node.role])
        seats = [self._seat(node, sights[node.name]) for node in region.nodes]
        claims = {key: _claim(region, one) for key, one in wanted.items()}
        moves = decide(seats, claims, region.pools)
        nodes = {node.name: node for node in region.nodes}
        for leave in moves.leave:
            self._ask_to_go(nodes[leave.name], leave, wanted)
        for name in moves.start:
            self._start(nodes[name], wanted)

    # ------------------------------------------------------------------ what there is

    def _seat(self, node: Node, sight: Sight) -> Seat:
        state, since_s, falls = self._standing(node.name, sight)
        return Seat(
            name=node.name,
            model=node.model,
            role=node.role,
            pool=node.pool,
            state=state,
            placed=sight.placed,
            idle_s=sight.idle_s,
            since_s=since_s,
            falls=falls,
            rests=sight.draining and state is not State.LEAVING,
            kept=node.name in self._fleet.reserved,
        )

    def _standing(self, name: str, sight: Sight) -> tuple[State, float, int]:
        """Its state, since when, and how often it fell meanwhile."""
        process, now = self._fleet.get(name), self._clock()
        if process is None:
            self._known.pop(name, None)
            return State.OFF, now - self._off_since.get(name, -math.inf), 0
        if name in self._leaving:
            return State.LEAVING, now - self._leaving[name].since, 0
        if process.exit_code is not None and name not in self._fleet.reserved:
            return State.FAILED, 0.0, 0
        known = self._known.get(name)
        if known is None:  # of the world's start, or of a rollout
            known = self._known[name] = _Known(now, now, process.since, told=True)
        self._look(name, known, process, sight)
        return State.UP if known.up else State.STARTING, now - known.since, known.falls

    def _look(self, name: str, known: _Known, process: Process, sight: Sight) -> None:
        now = self._clock()
        if process.since != known.born:
            known.born = process.since
            known.falls += 1
        if sight.alive != known.up:
            known.up, known.since, known.falls = sight.alive, now, 0
            if sight.alive and not known.told:
                known.told = True
                self._say(f"{name} is up after {now - known.seen:.1f} s")
        if sight.alive:
            known.seen = now

    # ------------------------------------------------------------------ what is done

    def _start(self, node: Node, wanted: Mapping[Key, Wanted]) -> None:
        try:
            process = self._fleet.start(self._spec(node.name), append=True, free=True)
        except ConfigError:
            return  # the world ends, or a rollout has just taken it out
        process.revive = self._revive
        now = self._clock()
        self._known[node.name] = _Known(now, now, process.since)
        self._say(f"{node.name} starts ({_why(node, wanted)})")

    def _ask_to_go(self, node: Node, leave: Leave, wanted: Mapping[Key, Wanted]) -> None:
        process = self._fleet.get(node.name)
        if process is None:
            return  # a rollout was quicker
        self._leaving[node.name] = _Leaving(process, self._clock(), offspring(process.pid))
        if leave.heir is None:
            self._say(f"{node.name} stops ({_why(node, wanted)})")
        else:
            self._say(f"{node.name} gives its place to {leave.heir}")
        process.retire()

    def _see_off(self, name: str, sight: Sight, deadline_s: float) -> None:
        leaving, now = self._leaving[name], self._clock()
        process = leaving.process
        if self._fleet.get(name) is not process:
            del self._leaving[name]  # a rollout has put another one in its place
            return
        if process.exit_code is not None and not runs_on(leaving.family):
            del self._leaving[name]
            self._fleet.drop(name)
            self._off_since[name] = now
            self._say(f"{name} is off")
            return
        known = self._known.get(name)
        if sight.alive and known is not None:
            known.seen = now
        seen = leaving.since if known is None else max(known.seen, leaving.since)
        if now - seen > LATE_S or now - leaving.since > deadline_s + LATE_S:
            process.end(0.0)
            for one in leaving.family:
                with suppress(psutil.NoSuchProcess):
                    one.kill()

    def _give_up(self, node: Node, wanted: Wanted) -> None:
        """One that has ended for good may be tried again once it is not wanted any more."""
        process = self._fleet.get(node.name)
        over = process is not None and process.exit_code is not None
        if over and not wanted.nodes and not {node.name} & {*self._leaving, *self._fleet.reserved}:
            self._fleet.drop(node.name)
            self._say(f"{node.name} is off")


def sights_of(region: Region, views: Sequence[RouterView]) -> dict[str, Sight]:
    """Of each of its nodes; what any router has on a node counts."""
    found = {node.name: Sight() for node in region.nodes}
    for one in (one for view in views for one in view.nodes):
        before = found.get(one.name)
        if before is None:
            continue  # of another topology
        if not one.alive:
            idle_s = before.idle_s
        else:
            idle_s = min(before.idle_s, one.idle_s) if before.alive else one.idle_s
        found[one.name] = Sight(
            alive=before.alive or one.alive,
            draining=before.draining or one.draining,
            placed=max(before.placed, one.placed),
            idle_s=idle_s,
        )
    return found


def merged(told: Iterator[Wanted]) -> dict[Key, Wanted]:
    """What several routers want, as if one had said it."""
    found: dict[Key, Wanted] = {}
    for one in told:
        key = str(one.model), one.role
        before = found.get(key, one)
        found[key] = Wanted(
            model=one.model,
            role=one.role,
            nodes=max(before.nodes, one.nodes),
            why=one.why if one.nodes >= before.nodes else before.why,
            waiting=max(before.waiting, one.waiting),
            waiting_s=max(before.waiting_s, one.waiting_s),
            in_use=before.in_use or one.in_use,
        )
    return found


def _claim(region: Region, one: Wanted) -> Claim:
    scale = region.scale.get(one.model)
    return Claim(
        nodes=one.nodes,
        least=0 if scale is None else scale.least,
        waiting=one.waiting,
        waiting_s=one.waiting_s,
        in_use=one.in_use,
    )


def _why(node: Node, wanted: Mapping[Key, Wanted]) -> str:
    told = wanted.get((node.model, node.role))
    return f"{node.model}, {told.why}" if told is not None else node.model


def _views(client: httpx.Client, world: World, region: Region) -> list[RouterView]:
    asked = (
        router_view(client, url, timeout_s=ASK_S)
        for url in door_urls(world.topology, [region]).values()
    )
    return [view for view in asked if view is not None]
