"""Edges and sites in virtual time: requests, publications on their way, a region that dies.

All edges hear the same frames at the same moments, so they share what regions say of themselves
and the hot set; each has its own recent sends, breaker and round trips.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.prefix import RouteKey, key_of
from core.status import RegionPrefixes, RegionStatus
from core.types import RegionName
from edge.routing.cache import counts_of
from edge.routing.hot import HotSets
from edge.routing.placement import Asked, Reason, RouteDecision
from edge.routing.ring import Ring
from edge.routing.seen import Heard, SeenRegion
from loadtest.simulator.geography import CITIES, SITES, City, round_trip_s
from loadtest.simulator.policies import POLICIES, Rules
from loadtest.simulator.site import MODEL, Site
from loadtest.simulator.traces import Request

EQUAL_TRIP_S = 0.03
ATTEMPTS = 3
"""As edge.gateway."""
SKEW = 1.6
KEY_DEPTH = 1
"""Blocks of 512 tokens; the product's two blocks of 512 bytes lie inside the first."""


@dataclass(frozen=True, slots=True)
class Setup:
    """`speed` divides the trace's times. `skewed`: askers are spread as people are over cities and
    the whole trace comes `SKEW` times as fast; else evenly. `fails`: (site, from, for) seconds."""

    edges: int = 16
    sites: int = 8
    blocks: int = 4000
    tokens_per_s: float = 13_333.0
    status_every_s: float = 0.5
    status_delay_s: float = 1.0
    real_trips: bool = False
    skewed: bool = False
    fails: tuple[int, float, float] | None = None
    gossip: bool = False
    """Every edge knows at once what any edge sends where, as none can: what it costs them not to
    know."""
    seed: int = 1
    rules: Rules = field(default_factory=Rules)


@dataclass(slots=True)
class Outcome:
    """One request's fate. `lost`: neither answered nor refused."""

    request: Request
    at_s: float
    ttft_s: float = 0.0
    cached: int = 0
    region: RegionName | None = None
    reason: Reason = Reason.PREFIX_HOME
    attempts: int = 1
    answered: bool = False
    cut: bool = False
    """Its region died in the middle of its answer: the caller got an error event."""
    moved: bool = False
    """Its key was another than that of its conversation's request before."""


@dataclass(slots=True)
class Edge:
    city: City
    regions: dict[RegionName, SeenRegion]


@dataclass(slots=True)
class _Running:
    outcome: Outcome
    edge: Edge
    first_at: float
    end_at: float
    left: list[RegionName]


@dataclass(slots=True)
class Result:
    setup: Setup
    outcomes: list[Outcome]
    sites: tuple[RegionName, ...]
    hot_peak: int = 0


class World:
    """Deterministic: the same requests, setup and policy give the same result."""

    def __init__(self, setup: Setup, policy: str) -> None:
        self._setup = setup
        self._policy = POLICIES[policy]
        self._chance = random.Random(setup.seed)
        cities = SITES[: setup.sites]
        self._sites = {
            RegionName(city.name): Site(
                RegionName(city.name),
                blocks=setup.blocks,
                tokens_per_s=setup.tokens_per_s,
                regions=setup.sites,
            )
            for city in cities
        }
        self._names = tuple(self._sites)
        self._ring = Ring(dict.fromkeys(self._names, 100))
        self._walks: dict[bytes, tuple[RegionName, ...]] = {}
        self._heard = {name: Heard() for name in self._names}
        self._hot = HotSets(setup.sites)
        self._edges, self._weights = _edges(setup, cities, self._heard)
        self._edge_of: dict[bytes, Edge] = {}
        self._next_status = 0.0
        self._on_the_way: deque[tuple[float, RegionName, RegionStatus, RegionPrefixes]] = deque()
        self._settled_at = float("-inf")
        self._down: set[RegionName] = set()
        self._running: dict[RegionName, list[_Running]] = {name: [] for name in self._names}
        self._hot_peak = 0
        fails = setup.fails
        self._changes: list[tuple[float, RegionName, bool]] = []
        if fails is not None:
            name = self._names[fails[0]]
            self._changes = [(fails[1], name, False), (fails[1] + fails[2], name, True)]

    def play(self, requests: Sequence[Request]) -> Result:
        speed = SKEW if self._setup.skewed else 1.0
        outcomes: list[Outcome] = []
        keys: dict[bytes, bytes] = {}
        for name in self._names:  # the world stood before the first request came
            self._publish(name, -self._setup.status_delay_s)
        for request in requests:
            now = request.at_s / speed
            self._until(now)
            found = key_of(request.chain, KEY_DEPTH, self._hot.current.ids)
            key = found.digest
            outcome = Outcome(request, now, moved=keys.get(request.user, key) != key)
            keys[request.user] = key
            outcomes.append(outcome)
            edge = self._edge(request.user)
            decision = self._choose(edge, request, found, now)
            outcome.reason = decision.reason
            self._attempt(outcome, edge, list(decision.candidates[:ATTEMPTS]), decision, now)
        if self._changes:  # what is still to fail may meet what still runs
            self._until(self._changes[-1][0])
        return Result(self._setup, outcomes, self._names, self._hot_peak)

    def _choose(self, edge: Edge, request: Request, key: RouteKey, now: float) -> RouteDecision:
        walk = self._walks.get(key.digest)
        if walk is None:
            walk = self._walks[key.digest] = self._ring.walk(key.digest)
        chain = request.chain
        asked = Asked(
            model=MODEL,
            walk=walk,
            text_bytes=chain.text_bytes,
            by_affinity=False,
            ids=chain.ids(),
            ends=chain.ends[1:],
            hot=key.depth > KEY_DEPTH,
            draws=(self._chance.random(), self._chance.random()),
        )
        view = [region.view(now) for region in edge.regions.values()]
        return self._policy(view, asked, self._setup.rules, self._chance)

    def _attempt(
        self,
        outcome: Outcome,
        edge: Edge,
        left: list[RegionName],
        decision: RouteDecision | None,
        now: float,
    ) -> None:
        """Try the candidates in turn; a dead region refuses the connection after a round trip."""
        request = outcome.request
        while left:
            name = left.pop(0)
            seen = edge.regions[name]
            trip = seen.trip.seconds
            ids = request.chain.ids()
            seen.sent(ids, decision.work_s(name) if decision else 0.0, now)
            if name in self._down:
                seen.cache.refused(ids)
                seen.breaker.failed(now)
                now += trip
                outcome.attempts += 1
                continue
            seen.breaker.succeeded()
            first, outcome.cached = self._sites[name].take(request, now + trip / 2)
            outcome.region, outcome.answered = name, True
            outcome.ttft_s = first + trip / 2 - outcome.at_s
            end = first + request.answer_tokens / 60.0
            if self._changes:
                self._running[name].append(_Running(outcome, edge, first, end, left))
            return
        outcome.answered = False

    def _edge(self, user: bytes) -> Edge:
        edge = self._edge_of.get(user)
        if edge is None:
            chance = random.Random(f"{self._setup.seed} {user.hex()}")
            edge = self._edge_of[user] = chance.choices(self._edges, self._weights)[0]
        return edge

    # ------------------------------------------------------------------ time

    def _until(self, now: float) -> None:
        """Whatever happens up to `now`, in its order."""
        while True:
            change_at = self._changes[0][0] if self._changes else float("inf")
            heard_at = self._on_the_way[0][0] if self._on_the_way else float("inf")
            moment = min(change_at, self._next_status, heard_at)
            if moment > now:
                return
            if moment == heard_at:
                self._hear(*self._on_the_way.popleft())
            elif moment == change_at:
                self._change(*self._changes.pop(0))
            else:
                self._next_status += self._setup.status_every_s
                for name in self._names:
                    if name not in self._down:
                        self._publish(name, moment)

    def _publish(self, name: RegionName, now: float) -> None:
        status, prefixes = self._sites[name].publish(now)
        self._on_the_way.append((now + self._setup.status_delay_s, name, status, prefixes))

    def _hear(
        self, now: float, name: RegionName, status: RegionStatus, prefixes: RegionPrefixes
    ) -> None:
        if name in self._down:
            return
        heard = self._heard[name]
        heard.take(status, now)
        heard.digest.take(prefixes)
        if prefixes.total:
            self._hot.take(name, counts_of(prefixes), prefixes.total, now)
        if now - self._settled_at >= 1.0:
            self._settled_at = now
            self._hot_peak = max(self._hot_peak, len(self._hot.settle(now).ids))

    def _change(self, now: float, name: RegionName, up: bool) -> None:
        if up:
            self._down.discard(name)
            self._sites[name].restart(now)
            self._running[name].clear()
            return
        self._down.add(name)
        self._heard[name].cut(now)
        for one in self._running[name]:
            if one.first_at > now:
                one.outcome.attempts += 1
                self._attempt(one.outcome, one.edge, one.left, None, now)
            elif one.end_at > now:
                one.outcome.cut = True
        self._running[name].clear()


def _edges(
    setup: Setup, sites: Sequence[City], heard: dict[RegionName, Heard]
) -> tuple[list[Edge], list[float]]:
    cities = [CITIES[i * len(CITIES) // setup.edges % len(CITIES)] for i in range(setup.edges)]
    if setup.edges > len(CITIES):
        cities = [CITIES[i % len(CITIES)] for i in range(setup.edges)]
    edges = [
        Edge(
            city,
            {
                RegionName(site.name): SeenRegion(
                    RegionName(site.name),
                    round_trip_s(city, site) if setup.real_trips else EQUAL_TRIP_S,
                    frozenset({MODEL}),
                    100,
                    heard[RegionName(site.name)],
                    setup.rules.weights,
                )
                for site in sites
            },
        )
        for city in cities
    ]
    if setup.gossip:
        for edge in edges[1:]:
            for name, seen in edge.regions.items():
                seen.cache = edges[0].regions[name].cache
    return edges, [edge.city.crowd if setup.skewed else 1.0 for edge in edges]
