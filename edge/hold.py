"""Where requests wait at the edge while every region that may have them is busy, or drains and is
about to come back.

`Line` decides who is next: among namespaces in turn, within one by age. `Hold` brings lines to
life: it lets as many try again as a region's newest status shows room for, and the first of a line
now and then anyway. A request keeps its place while it tries, so that a refusal costs it nothing.

Bounded in count and in time; what is over either bound is refused with the region's own words. A
caller who leaves is out of its line at once.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field

from core.errors import RequestError
from core.status import RegionStatus
from core.types import ModelName, RegionName

TELL_S = 1.0
"""Between two words to a caller about its place; the first one comes after as long, so that a
short wait leaves the answer's status open."""
LEAST_PAUSE_S, MOST_PAUSE_S = 0.25, 5.0
"""Bounds on what a region's Retry-After makes the first of a line wait without better news."""
AT_ONCE = 8
"""Requests that one status frame sets free: other edges see the same room."""


@dataclass(frozen=True, slots=True)
class Held:
    """A caller's place: 1 is next, of `waiting`. Another namespace's turn may move it back."""

    position: int
    waiting: int


@dataclass(slots=True, eq=False)
class Ticket:
    """A place in a line. `turn` orders a line; `trying`: it is at a region again."""

    namespace: str
    turn: tuple[int, int]
    trying: bool = False
    go: asyncio.Event = field(default_factory=asyncio.Event)


class Line:
    """Requests for one model that may go to the same regions. No I/O.

    Each namespace's requests take rounds one after the other, and the lowest round is next: a
    namespace with a hundred waiting requests delays another's first by one.
    """

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._rounds: dict[str, int] = {}
        self._round = 0
        self._ages = itertools.count()

    def __len__(self) -> int:
        return len(self._tickets)

    def join(self, namespace: str) -> Ticket:
        number = max(self._round, self._rounds.get(namespace, 0)) + 1
        self._rounds[namespace] = number
        ticket = Ticket(namespace, (number, next(self._ages)))
        self._tickets.append(ticket)
        return ticket

    def leave(self, ticket: Ticket, *, served: bool) -> None:
        """Idempotent. Rounds move on with who was served, not with who gave up."""
        if ticket not in self._tickets:
            return
        self._tickets.remove(ticket)
        if served:
            self._round = max(self._round, ticket.turn[0])
        if not any(one.namespace == ticket.namespace for one in self._tickets):
            self._rounds.pop(ticket.namespace, None)

    def waiting(self) -> list[Ticket]:
        """Who does not try at this moment, the next first."""
        still = [one for one in self._tickets if not one.trying]
        return sorted(still, key=lambda one: one.turn)

    def place(self, ticket: Ticket) -> Held:
        ahead = sum(one.turn < ticket.turn for one in self._tickets if not one.trying)
        return Held(ahead + 1, sum(not one.trying for one in self._tickets))


@dataclass(frozen=True, slots=True)
class Group:
    """Who stands in one line: `allowed` None is every region."""

    model: ModelName
    allowed: frozenset[RegionName] | None

    def takes(self, status: RegionStatus) -> bool:
        within = self.allowed is None or status.region in self.allowed
        return within and any(one.name == self.model for one in status.models)


class Hold:
    """`limit` requests for at most `wait_s` each; `region_queue`: how many a region lets wait."""

    def __init__(
        self,
        *,
        limit: int,
        wait_s: float,
        region_queue: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._wait_s = wait_s
        self._region_queue = region_queue
        self._clock = clock
        self._lines: dict[Group, Line] = {}

    @property
    def held(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def crowded(self, group: Group) -> bool:
        """Whether somebody waits already: who comes now stands behind them."""
        line = self._lines.get(group)
        return line is not None and bool(line.waiting())

    def join(self, group: Group, namespace: str, *, most_s: float) -> Place | None:
        """A place for `most_s` at most; None when there is no room left here either."""
        if self.held >= self._limit:
            return None
        line = self._lines.setdefault(group, Line())
        wait_s = min(self._wait_s, most_s)
        return Place(self, group, line, line.join(namespace), wait_s, self._clock)

    def heard(self, status: RegionStatus) -> None:
        """A region's newest status: let as many try as it has room for."""
        if status.draining or not self._lines:
            return
        room = min(self._region_queue - status.queued, AT_ONCE)
        for ticket in itertools.islice(self._candidates(status), max(0, room)):
            ticket.go.set()

    def _candidates(self, status: RegionStatus) -> Iterator[Ticket]:
        for group, line in self._lines.items():
            if group.takes(status):
                yield from (one for one in line.waiting() if not one.go.is_set())

    def forget(self, group: Group) -> None:
        line = self._lines.get(group)
        if line is not None and not len(line):
            del self._lines[group]


class Place:
    """One held request. Used by its own task; `leave` ends it, whatever became of it."""

    def __init__(
        self,
        hold: Hold,
        group: Group,
        line: Line,
        ticket: Ticket,
        wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._hold = hold
        self._group = group
        self._line = line
        self._ticket = ticket
        self._until = clock() + wait_s
        self._clock = clock

    @property
    def now(self) -> Held:
        return self._line.place(self._ticket)

    async def turn(self, refusal: RequestError) -> AsyncGenerator[Held, None]:
        """Ends when it is time to try again; tells the place meanwhile, when it has changed.

        Raises `refusal` when the time to wait is over.
        """
        ticket = self._ticket
        ticket.trying = False
        ticket.go.clear()
        wanted = refusal.retry_after_s or LEAST_PAUSE_S
        again = self._clock() + min(max(wanted, LEAST_PAUSE_S), MOST_PAUSE_S)
        tell = self._clock() + TELL_S
        told: Held | None = None
        while not ticket.go.is_set():
            now = self._clock()
            if now >= self._until:
                raise refusal
            if now >= tell:
                tell = now + TELL_S
                if self.now != told:
                    told = self.now
                    yield told
            if now >= again and self.now.position == 1:
                break
            try:
                async with asyncio.timeout(min(self._until, tell) - now):
                    await ticket.go.wait()
            except TimeoutError:
                continue
        ticket.trying = True

    def leave(self, *, served: bool) -> None:
        """Idempotent."""
        self._line.leave(self._ticket, served=served)
        self._hold.forget(self._group)
