"""Streams at one moment over several machines: each process holds places of the tenant's, leased
from the share.

All processes together never hold more than there are. A place that falls idle serves this
process's next request; one that was idle for a second goes back. So a tenant may be refused while
another process sits on an idle place, for two seconds at most.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from core.errors import LimitsUnavailable
from edge.tenants.share import HOLD_S, Share

KEEP_S = HOLD_S / 4
"""How often places in use are said again."""


@dataclass(slots=True)
class _Places:
    most: int
    held: int = 0
    open: int = 0
    idle: int = 0
    """At the last look."""
    said_at: float = 0.0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class StreamLeases:
    """`tasks` takes questions, so that a caller that leaves breaks off none half way. Times are the
    loop's."""

    def __init__(self, share: Share, tasks: asyncio.TaskGroup) -> None:
        self._share = share
        self._tasks = tasks
        self._of: dict[str, _Places] = {}

    async def enter(self, tenant: str, most: int) -> bool:
        """Whether a place was had; then it is the caller's until `leave`. Raises
        LimitsUnavailable."""
        places = self._of.setdefault(tenant, _Places(most))
        if places.open >= places.held:
            async with places.lock:
                if places.open >= places.held:
                    await self._ask(tenant, places, places.open + 1 - places.held)
        if places.open >= places.held:
            return False
        places.open += 1
        return True

    def leave(self, tenant: str) -> None:
        self._of[tenant].open -= 1

    async def tend(self) -> None:
        """Each second: give back what nobody used since the last time, keep the rest. Raises
        LimitsUnavailable."""
        now = asyncio.get_running_loop().time()
        for tenant, places in list(self._of.items()):
            async with places.lock:
                spare = max(0, min(places.held - places.open, places.idle))
                places.held -= spare
                places.idle = places.held - places.open
                if spare or (places.held and now - places.said_at >= KEEP_S):
                    await self._ask(tenant, places, 0)
                if not (places.held or places.open):
                    del self._of[tenant]

    async def _ask(self, tenant: str, places: _Places, need: int) -> None:
        asking = self._tasks.create_task(self._hold(tenant, places, need), name="stream lease")
        error = await asyncio.shield(asking)
        if error is not None:
            raise error

    async def _hold(self, tenant: str, places: _Places, need: int) -> LimitsUnavailable | None:
        """Why nobody knows; a task that raised would end its group."""
        try:
            grant = await self._share.hold(tenant, places.most, have=places.held, need=need)
        except LimitsUnavailable as error:
            return error
        places.held = grant.granted
        places.said_at = asyncio.get_running_loop().time()
        return None
