"""A limit that several ledgers share: each leases parts of it ahead and gives them out alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edge.tenants.meter import Limit


@dataclass(frozen=True, slots=True)
class Grant:
    """`granted`: all that this ledger has of the window now. `left`: what nobody has."""

    granted: int
    left: int


class Share(Protocol):
    async def take(self, tenant: str, limit: Limit, window: int, *, have: int, need: int) -> Grant:
        """Lease at least `need` more of a window, or nothing where that much is not left; more than
        `need` where a lease is larger. Raises LimitsUnavailable."""
        ...

    def lease(self, limit: Limit) -> int:
        """How much is taken at a time."""
        ...
