"""Who may come in: a bounded number of requests, and none while the edge drains.

A permit is held exactly as long as its request, streams included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from core.errors import Draining, NoCapacity


class Admission:
    """`limit`: requests in flight through this edge at one moment."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_flight = 0
        self._draining = self._resting = False

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def draining(self) -> bool:
        """Nothing new comes in: for good, or until the operator lets it."""
        return self._draining or self._resting

    @property
    def closed(self) -> str:
        """Why nothing new comes in, for the operator; empty while it does."""
        if self._draining:
            return "this edge is shutting down"
        return "this edge takes nothing new (drained)" if self._resting else ""

    def drain(self) -> None:
        """Refuse from now on; those inside finish."""
        self._draining = True

    def rest(self, resting: bool) -> None:
        """By order of the operator: the same, until it is taken back."""
        self._resting = resting

    @contextmanager
    def permit(self) -> Iterator[None]:
        """Raises Draining or NoCapacity."""
        if self._draining:
            raise Draining("this edge is shutting down", retry_after_s=1.0)
        if self._resting:
            raise Draining("this edge takes nothing new at the moment", retry_after_s=5.0)
        if self._in_flight >= self._limit:
            raise NoCapacity(f"this edge already carries {self._limit} requests", retry_after_s=1.0)
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
