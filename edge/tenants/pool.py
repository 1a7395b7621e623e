"""Where reservations come from: this machine's ledger, and leases of what is shared beyond it."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from core.errors import LimitsUnavailable
from edge.tenants.ledger import Ask, Ledger, Reply
from edge.tenants.meter import Fits, Kind, Limit, Short, TooMany
from edge.tenants.share import Share
from edge.tenants.streams import StreamLeases

_log = logging.getLogger("skerry.budget")

TICK_S = 1.0
AHEAD_S = 1.5
"""Before a step of a minute ends, active tenants lease from the next one."""
_THEN = {
    "refuse": "leases go on until they are used up, then requests with limits are refused",
    "allow": "leases go on until they are used up, then each machine grants whole limits",
}


@dataclass(frozen=True, slots=True)
class _Watched:
    tenant: str
    limit: Limit


@dataclass(frozen=True, slots=True)
class _Settlement:
    request_id: str
    tokens: int
    counts: bool


class Pool:
    """`share` None: the ledger grants whole limits. `when_lost`: what to do once leases are used up
    and the share is not reached. `tasks` takes leases that nobody waits for."""

    def __init__(
        self,
        ledger: Ledger,
        share: Share | None,
        *,
        when_lost: Literal["refuse", "allow"],
        tasks: asyncio.TaskGroup,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._share = share
        self._streams = None if share is None else StreamLeases(share, tasks)
        self._in_place: dict[str, str] = {}
        """Tenant of each request that has a leased stream."""
        self._when_lost = when_lost
        self._tasks = tasks
        self._clock = clock
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._active: dict[_Watched, int] = {}
        self._asking: set[_Watched] = set()
        self._late: list[_Settlement] = []
        self._reached = True

    @property
    def shared(self) -> bool:
        return self._share is not None

    @property
    def name(self) -> str:
        """The ledger's."""
        return self._ledger.name

    async def reserve(self, ask: Ask) -> Reply:
        """Reserve from the ledger, leasing from the share where it is short."""
        if self._streams is None or ask.max_streams is None:
            return await self._reserve(ask)
        try:
            if not await self._streams.enter(ask.tenant, ask.max_streams):
                return Reply(TooMany(ask.max_streams), {})
        except LimitsUnavailable as error:
            self._lost(error)
            if self._when_lost == "refuse":
                raise
            return await self._reserve(ask)  # this machine's count stands for all
        self._in_place[ask.id] = ask.tenant
        fits = False
        try:
            reply = await self._reserve(replace(ask, max_streams=None))
            fits = isinstance(reply.verdict, Fits)
        finally:
            if not fits:
                self._leave(ask.id)
        return reply

    def adjust(self, request_id: str, tokens: int) -> None:
        """A ledger that cannot be had now keeps the estimate until the request is settled."""
        try:
            self._ledger.adjust(request_id, tokens, self._clock())
        except LimitsUnavailable as error:
            _log.error("reservation not corrected why=%s", error.message)

    def settle(self, request_id: str, tokens: int, *, counts: bool) -> None:
        """Now, or with the next tick where the ledger cannot be had."""
        self._leave(request_id)
        try:
            self._ledger.settle(request_id, tokens, self._clock(), counts=counts)
        except LimitsUnavailable as error:
            _log.error("reservation not settled yet why=%s", error.message)
            self._late.append(_Settlement(request_id, tokens, counts))

    def correct_day(self, tenant: str, day: int, tokens: int) -> None:
        """`tokens` more, or fewer, were used on `day` than were charged. Nothing once it is over.
        Raises LimitsUnavailable."""
        self._ledger.correct_day(tenant, day, tokens, self._clock())

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.tick()
            await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        """What is due each second; what fails now is tried with the next."""
        try:
            while self._late:
                late = self._late[-1]
                self._ledger.settle(late.request_id, late.tokens, self._clock(), counts=late.counts)
                self._late.pop()
            self.lease_ahead()
            if self._streams is not None:
                await self._streams.tend()
        except LimitsUnavailable as error:
            if self._reached:
                _log.error("limits not tended why=%s", error.message)

    def lease_ahead(self) -> None:
        """Lease from the next step for tenants that used this one, shortly before it begins, and
        tell what those used that are quiet now. Raises LimitsUnavailable."""
        now = self._clock()
        for watched, window in list(self._active.items()):
            present = watched.limit.window(now)
            if window < present:
                del self._active[watched]
                self._ask_aside(watched, present, 0)
            elif watched.limit.kind is not Kind.DAY and watched.limit.ends_s(now) <= AHEAD_S:
                following = present + 1
                if not self._ledger.granted(watched.tenant, watched.limit, following, now):
                    self._ask_aside(watched, following, 1)

    async def _reserve(self, ask: Ask) -> Reply:
        reply = self._ledger.reserve(ask, self._clock())
        if isinstance(reply.verdict, Short) and ask.leased:
            async with self._locks[ask.tenant]:  # one question at a time; the next may need none
                reply = await self._lease_until_fits(ask)
        if isinstance(reply.verdict, Fits):
            self._look_ahead(ask, reply)
        return reply

    async def _lease_until_fits(self, ask: Ask) -> Reply:
        for _ in range(len(ask.limits) + 1):
            reply = self._ledger.reserve(ask, self._clock())
            if not isinstance(reply.verdict, Short):
                return reply
            limit = reply.verdict.limit
            watched, window = _Watched(ask.tenant, limit), limit.window(self._clock())
            # A task of its own: a caller that leaves must not break off a question half way.
            asking = self._lease(watched, window, reply.verdict.missing)
            granted = await asyncio.shield(self._tasks.create_task(asking, name="lease"))
            if isinstance(granted, LimitsUnavailable):
                if self._when_lost == "refuse":
                    raise granted
                ask = replace(ask, leased=False)
            if granted is not True:
                break
        return self._ledger.reserve(ask, self._clock())

    async def _lease(self, watched: _Watched, window: int, need: int) -> bool | LimitsUnavailable:
        """Whether anything was granted, or why nobody knows; a task that raised would end its
        group."""
        assert self._share is not None, "leases come from a share"
        tenant, limit, now = watched.tenant, watched.limit, self._clock()
        try:
            have = self._ledger.granted(tenant, limit, window, now)
            *counted, _ = self._ledger.meter(tenant, limit, now).counted
            first = limit.window(now) - len(counted)
            past = {first + age: count for age, count in enumerate(counted)}
            grant = await self._share.take(tenant, limit, window, have=have, need=need, past=past)
            self._found()
            self._ledger.grant(tenant, limit, window, grant.granted, grant.left, self._clock())
        except LimitsUnavailable as error:
            self._lost(error)
            return error
        return grant.granted > have

    def _lost(self, error: LimitsUnavailable) -> None:
        """The loss of the share is said in the log when it begins and when it is over."""
        if self._reached:
            kind = type(error.__cause__ or error).__name__
            _log.warning("shared limits lost kind=%s; %s", kind, _THEN[self._when_lost])
        self._reached = False

    def _found(self) -> None:
        if not self._reached:
            _log.info("shared limits are back")
        self._reached = True

    def _look_ahead(self, ask: Ask, reply: Reply) -> None:
        """Top up while there is still enough for the next requests."""
        if self._share is None or not ask.leased:
            return
        now = self._clock()
        for limit in ask.limits:
            watched, meter = _Watched(ask.tenant, limit), reply.meters[limit.kind]
            self._active[watched] = limit.window(now)
            if meter.elsewhere > 0 and meter.free < self._share.lease(limit) // 2:
                self._ask_aside(watched, limit.window(now), 1)

    def _ask_aside(self, watched: _Watched, window: int, need: int) -> None:
        if watched not in self._asking:
            self._asking.add(watched)
            self._tasks.create_task(self._aside(watched, window, need), name="lease ahead")

    async def _aside(self, watched: _Watched, window: int, need: int) -> None:
        try:
            await self._lease(watched, window, need)  # its failure is said in the log
        finally:
            self._asking.discard(watched)

    def _leave(self, request_id: str) -> None:
        tenant = self._in_place.pop(request_id, None)
        if tenant is not None and self._streams is not None:
            self._streams.leave(tenant)
