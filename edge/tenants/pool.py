"""Where reservations come from: this machine's ledger, and leases of what is shared beyond it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from core.errors import LimitsUnavailable
from edge.tenants.ledger import Ask, Ledger, Reply
from edge.tenants.meter import Fits, Limit, Short
from edge.tenants.share import Grant, Share

_log = logging.getLogger("skerry.budget")

TICK_S = 1.0
RENEW_S = 5.0
AHEAD_S = 3.0
"""Before a window ends, active tenants lease from the next one."""
_THEN = {
    "refuse": "leases go on until they are used up, then requests with limits are refused",
    "allow": "leases go on until they are used up, then each machine grants whole limits",
}


@dataclass(frozen=True, slots=True)
class _Watched:
    tenant: str
    limit: Limit


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
        self._when_lost = when_lost
        self._tasks = tasks
        self._clock = clock
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._active: dict[_Watched, int] = {}
        self._asking: set[_Watched] = set()
        self._reached = True

    @property
    def shared(self) -> bool:
        return self._share is not None

    async def reserve(self, ask: Ask) -> Reply:
        """Reserve from the ledger, leasing from the share where it is short."""
        reply = self._ledger.reserve(ask, self._clock())
        if isinstance(reply.verdict, Short) and self._share is not None:
            async with self._locks[ask.tenant]:  # one question at a time; the next may need none
                reply = await self._lease_until_fits(ask)
        if isinstance(reply.verdict, Fits):
            self._look_ahead(ask, reply)
        return reply

    def adjust(self, request_id: str, tokens: int) -> None:
        self._tolerantly(lambda: self._ledger.adjust(request_id, tokens))

    def settle(self, request_id: str, tokens: int, *, counts: bool) -> None:
        self._tolerantly(lambda: self._ledger.settle(request_id, tokens, counts=counts))

    async def run(self) -> None:
        """Until cancelled."""
        renewed = float("-inf")
        while True:
            if time.monotonic() - renewed >= RENEW_S:
                renewed = time.monotonic()
                self.renew()
            self.lease_ahead()
            await asyncio.sleep(TICK_S)

    def renew(self) -> None:
        self._tolerantly(lambda: self._ledger.renew(self._clock()))

    def lease_ahead(self) -> None:
        """Lease from the next window for tenants that used this one, shortly before it begins."""
        self._tolerantly(lambda: self._lease_ahead(self._clock()))

    def _lease_ahead(self, now: float) -> None:
        for watched, window in list(self._active.items()):
            present = watched.limit.window(now)
            if window < present:
                del self._active[watched]
            elif watched.limit.resets_s(now) <= AHEAD_S:
                following = self._ledger.meter(watched.tenant, watched.limit, present + 1)
                if not following.granted:
                    self._ask_aside(watched, present + 1)

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
        tenant, limit = watched.tenant, watched.limit
        try:
            have = self._ledger.meter(tenant, limit, window).granted
            grant = await self._take(watched, window, have, need)
            self._ledger.grant(tenant, limit, window, grant.granted, grant.left)
        except LimitsUnavailable as error:
            return error
        return grant.granted > have

    async def _take(self, watched: _Watched, window: int, have: int, need: int) -> Grant:
        """Ask the share; its loss is said in the log when it begins and when it is over."""
        assert self._share is not None, "leases come from a share"
        try:
            grant = await self._share.take(
                watched.tenant, watched.limit, window, have=have, need=need
            )
        except LimitsUnavailable as error:
            if self._reached:
                kind = type(error.__cause__ or error).__name__
                _log.warning("shared limits lost kind=%s; %s", kind, _THEN[self._when_lost])
            self._reached = False
            raise
        if not self._reached:
            _log.info("shared limits are back")
        self._reached = True
        return grant

    def _look_ahead(self, ask: Ask, reply: Reply) -> None:
        """Top up while there is still enough for the next requests."""
        if self._share is None or not ask.leased:
            return
        now = self._clock()
        for limit in ask.limits:
            watched, meter = _Watched(ask.tenant, limit), reply.meters[limit.kind]
            self._active[watched] = limit.window(now)
            if meter.elsewhere > 0 and meter.free < self._share.lease(limit) // 2:
                self._ask_aside(watched, limit.window(now))

    def _ask_aside(self, watched: _Watched, window: int) -> None:
        if watched not in self._asking:
            self._asking.add(watched)
            self._tasks.create_task(self._aside(watched, window), name="lease ahead")

    async def _aside(self, watched: _Watched, window: int) -> None:
        try:
            granted = await self._lease(watched, window, 1)
        finally:
            self._asking.discard(watched)
        if isinstance(granted, LimitsUnavailable) and self._reached:  # else it was said
            _log.warning("no lease ahead limit=%s why=%s", watched.limit.kind, granted.message)

    def _tolerantly(self, work: Callable[[], object]) -> None:
        """For what nobody waits for: a reservation that cannot be settled now is settled when its
        lease ends."""
        try:
            work()
        except LimitsUnavailable as error:
            _log.error("ledger of limits why=%s", error.message)
