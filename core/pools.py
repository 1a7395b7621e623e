"""Which of a region's nodes should run, where some share a place with others. Pure: who runs now
and who is asked for in, who is to start and who is to go out.

A place is taken from the start of a node until its process is gone: memory is what it stands for.
Whoever is waited for gets a free place, the longest wait first. Where there is none, the node that
has been idle longest gives way at once. Where all are busy, and somebody waits for a model that
nobody serves, the node that has had its place longest, and for a turn at the least, takes nothing
new and goes when it has answered: models take turns, and no answer is broken off. A model that has
just given way stands behind those that waited meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from core.types import Role

if TYPE_CHECKING:  # core.config_regions imports what this module is beside
    from core.config_regions import Pool

IDLE_S = 0.25
"""Who has just answered is often asked again at once: idle is who was not for so long."""
LATE_S = 120.0
"""A node that has not come up after this holds its place like one that is busy."""
FALLS = 2
"""So does one that has ended so often by itself before it came up, after a turn."""

Key = tuple[str, str]
"""A model and a role."""


class State(StrEnum):
    OFF = "off"
    STARTING = "starting"
    """Its process is there; it serves nobody yet, or nobody can reach it."""
    UP = "up"
    LEAVING = "leaving"
    """Asked to go; its process is still there."""
    FAILED = "failed"
    """Its process has ended for good, and is not to be started now."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A node at one moment. `placed`: requests on it. `rests`: by order of the operator. `kept`:
    somebody else starts and stops it now."""

    name: str
    model: str
    role: str
    pool: str | None = None
    state: State = State.OFF
    placed: int = 0
    idle_s: float = 0.0
    since_s: float = 0.0
    """In this state; when it is STARTING also through ends and new starts."""
    falls: int = 0
    """While it is STARTING: how often it has ended by itself."""
    rests: bool = False
    kept: bool = False

    @property
    def key(self) -> Key:
        return self.model, self.role

    @property
    def answers(self) -> bool:
        return self.role != Role.PREFILL


@dataclass(frozen=True, slots=True)
class Claim:
    """What is asked of a model and role: nodes that should run, of which `least` always; requests
    that wait for the model, and how long the first has; whether any request for it is under way."""

    nodes: int
    least: int = 0
    waiting: int = 0
    waiting_s: float = 0.0
    in_use: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """`heir`: the model for whose sake; None when the node is just not needed."""

    name: str
    heir: str | None = None


@dataclass(frozen=True, slots=True)
class Moves:
    start: tuple[str, ...] = ()
    leave: tuple[Leave, ...] = ()


class _Level(IntEnum):
    """How much a node is needed."""

    LEAST = 0
    COLD = 1
    """Somebody waits, and nobody serves the model."""
    WAITED_FOR = 2
    IN_USE = 3
    WANTED = 4
    """By a number alone: no place of a pool is given to that."""


@dataclass(frozen=True, slots=True)
class _Need:
    key: Key
    level: _Level
    patience_s: float
    """How long it has been kept waiting, since it had a place last."""


def decide(seats: Sequence[Seat], claims: Mapping[Key, Claim], pools: Mapping[str, Pool]) -> Moves:
    """`seats` in the topology's order: of nodes that are alike the first ones run. What has no
    claim is left as it is."""
    return _Decision(seats, claims, pools).moves()


class _Decision:
    def __init__(
        self, seats: Sequence[Seat], claims: Mapping[Key, Claim], pools: Mapping[str, Pool]
    ) -> None:
        self._seats = sorted(seats, key=lambda one: one.rests)  # stable: the others first
        self._claims = claims
        self._pools = pools
        taken = Counter(one.pool for one in seats if one.state not in (State.OFF, State.FAILED))
        self._free = {name: pool.places - taken[name] for name, pool in pools.items()}
        self._coming = Counter(one.pool for one in seats if one.state is State.LEAVING)
        self._start: list[str] = []
        self._leave: dict[str, Leave] = {}

    def moves(self) -> Moves:
        for key, claim in self._claims.items():
            for seat in self._surplus(key, claim):
                self._leave[seat.name] = Leave(seat.name)
                self._coming[seat.pool] += 1
        for need in sorted(self._needs(), key=lambda one: (one.level, -one.patience_s)):
            self._serve(need)
        return Moves(tuple(self._start), tuple(self._leave.values()))

    # ------------------------------------------------------------------ what there is

    def _of(self, key: Key) -> Iterator[Seat]:
        return (one for one in self._seats if one.key == key)

    def _present(self, seats: Iterable[Seat]) -> list[Seat]:
        """Those that hold a place and keep it."""
        there = (State.STARTING, State.UP)
        return [one for one in seats if one.state in there and one.name not in self._leave]

    def _surplus(self, key: Key, claim: Claim) -> list[Seat]:
        """Who is not needed; of those that rest, all that others can stand in for."""
        able = sum(not one.rests for one in self._of(key))
        here = self._present(self._of(key))
        running = [one for one in here if not one.rests]
        resting = [one for one in here if one.rests]
        gone = running[max(0, claim.nodes) :] + resting[max(0, claim.nodes - able) :]
        return [one for one in gone if not one.kept]

    def _needs(self) -> Iterator[_Need]:
        for key, claim in self._claims.items():
            model, role = key
            here = len(self._present(self._of(key)))
            off = [one.since_s for one in self._of(key) if one.state is State.OFF]
            patience_s = min(claim.waiting_s, *off) if off else claim.waiting_s
            served = self._present(one for one in self._seats if one.model == model and one.answers)
            urgent = claim.waiting > 0 and role != Role.PREFILL and not served
            for number in range(here, claim.nodes):
                level = _Level.WANTED
                if number < claim.least:
                    level = _Level.LEAST
                elif urgent and number == here:
                    level = _Level.COLD
                elif claim.waiting:
                    level = _Level.WAITED_FOR
                elif claim.in_use:
                    level = _Level.IN_USE
                yield _Need(key, level, patience_s)

    # ------------------------------------------------------------------ who gets what

    def _serve(self, need: _Need) -> None:
        off = [
            one
            for one in self._of(need.key)
            if one.state is State.OFF and not one.kept and one.name not in self._start
        ]
        for one in off:
            if one.pool is None:
                self._start.append(one.name)
                return
        able = [one for one in off if not one.rests]
        if need.level is _Level.WANTED or not able:
            return
        for one in able:
            if one.pool is not None and self._free[one.pool] > 0:
                self._free[one.pool] -= 1
                self._start.append(one.name)
                return
        pools = dict.fromkeys(one.pool for one in able)
        for pool in pools:
            if self._coming[pool] > 0:
                self._coming[pool] -= 1  # it is its own once its owner has gone
                return
        model, _ = need.key
        heir = self._idle(need, pools) or self._longest(need, pools)
        if heir is not None:
            self._leave[heir.name] = Leave(heir.name, model)

    def _candidates(self, need: _Need, pools: Iterable[str | None]) -> Iterator[Seat]:
        """Who may be asked to give way for it."""
        model, role = need.key
        for one in self._present(one for one in self._seats if one.pool in pools):
            claim = self._claims.get(one.key)
            if claim is None or one.kept:
                continue  # nothing is known of what it is for
            if one.model == model and (role == Role.PREFILL or one.answers):
                continue  # its own
            others = [seat for seat in self._present(self._of(one.key)) if not seat.rests]
            if one.rests or len(others) > claim.least:
                yield one

    def _idle(self, need: _Need, pools: Iterable[str | None]) -> Seat | None:
        """Of those that nobody needs now the one that has been so longest."""
        hasty = need.level is not _Level.IN_USE
        idle: list[tuple[float, Seat]] = []
        for one in self._candidates(need, pools):
            idle_s = self._idle_s(one)
            if idle_s is not None and idle_s >= (IDLE_S if hasty else self._turn_s(one)):
                idle.append((idle_s, one))
        return max(idle, key=lambda pair: pair[0])[1] if idle else None

    def _idle_s(self, seat: Seat) -> float | None:
        """None for one that is needed."""
        claim = self._claims[seat.key]
        if claim.waiting and not seat.rests:
            return None  # they are on their way to it
        if seat.state is State.STARTING:
            return None if claim.in_use else math.inf  # whoever asked for it has gone
        return None if seat.placed else seat.idle_s

    def _longest(self, need: _Need, pools: Iterable[str | None]) -> Seat | None:
        """Whose turn is over: who leaves its model served first, then who had its place longest."""
        if need.level > _Level.COLD:
            return None
        over = [one for one in self._candidates(need, pools) if self._turn_over(one)]
        return max(over, key=lambda one: (self._spared(one), one.since_s)) if over else None

    def _turn_over(self, seat: Seat) -> bool:
        if seat.state is State.UP:
            return seat.since_s >= self._turn_s(seat)
        fell = seat.falls >= FALLS and seat.since_s >= self._turn_s(seat)
        return fell or seat.since_s >= LATE_S

    def _spared(self, seat: Seat) -> bool:
        """Whether its model can be answered without it."""
        same = (one for one in self._seats if one.model == seat.model and one.answers)
        return any(
            one.state is State.UP and not one.rests and one.name != seat.name
            for one in self._present(same)
        )

    def _turn_s(self, seat: Seat) -> float:
        return self._pools[seat.pool].turn_s if seat.pool is not None else 0.0
