"""A limit that several ledgers share: each leases parts of it ahead and gives them out alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from edge.tenants.meter import Limit


@dataclass(frozen=True, slots=True)
class Grant:
    """`granted`: all that the asker has now. `left`: what nobody has."""

    granted: int
    left: int


class Share(Protocol):
    """Every question raises LimitsUnavailable where the pot is not reached."""

    async def take(
        self,
        tenant: str,
        limit: Limit,
        window: int,
        *,
        have: int,
        need: int,
        past: Mapping[int, int],
    ) -> Grant:
        """Lease at least `need` more for a window, or nothing where that much is not left in all
        windows that count; more than `need` where a lease is larger. `past`: what this ledger used
        of earlier windows; what it had leased beyond that is free again. `need` 0 only tells."""
        ...

    async def hold(self, tenant: str, streams: int, *, have: int, need: int) -> Grant:
        """Of `streams` at one moment, this process has `have` and wants `need` more, or nothing;
        `need` 0 keeps, and gives back what it had beyond `have`. Held until HOLD_S after it was
        said last."""
        ...

    def lease(self, limit: Limit) -> int:
        """How much is taken at a time."""
        ...


HOLD_S = 20.0
