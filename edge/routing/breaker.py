"""Whether attempts at a region are let through, after others there have failed. Pure, time passed
in.

::

    CLOSED     all are let through; FAILURES in a row open it
    OPEN       none, for the pause; then HALF_OPEN
    HALF_OPEN  one on trial, one more for each that came back well; TRIALS well ones close it, a
               failure opens it again for twice the pause

The pause starts small again only after the breaker has stayed closed for a while, so that a region
that keeps failing just after its recovery is tried less and less often. What fails while it is
open was sent before and says nothing new. A region with an open breaker is used last, not never:
with all of them open the request still goes somewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

FAILURES = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0
TRIALS = 2
TRIAL_S = 10.0
"""A trial that has not come back within this (its caller left, its prompt is long) blocks no
more."""
FORGIVE_S = 30.0


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Breaker:
    _state: State = State.CLOSED
    _failures: int = 0
    _good: int = 0
    """Trials that came back well since it was last open."""
    _under_way: int = 0
    _sent_at: float = float("-inf")
    """When the last trial was sent."""
    _pause_s: float = FIRST_PAUSE_S
    _until: float = float("-inf")
    _closed_at: float = float("-inf")
    _now: float = float("-inf")

    def state(self, now: float) -> State:
        self._now = max(self._now, now)
        if self._state is State.OPEN and now >= self._until:
            self._state = State.HALF_OPEN
            self._good = self._under_way = 0
        return self._state

    def open(self, now: float) -> bool:
        """Whether the region is to be left alone at this moment."""
        state = self.state(now)
        if state is not State.HALF_OPEN:
            return state is State.OPEN
        if now - self._sent_at > TRIAL_S:
            self._under_way = 0
        return self._under_way > self._good

    def sent(self, now: float) -> None:
        """An attempt was let through."""
        if self.state(now) is State.HALF_OPEN:
            self._under_way += 1
            self._sent_at = now

    def failed(self, now: float) -> None:
        """By the region's own fault."""
        state = self.state(now)
        self._failures += 1
        if state is State.HALF_OPEN:
            self._trip(now)
        elif state is State.CLOSED and self._failures >= FAILURES:
            if now - self._closed_at > FORGIVE_S:
                self._pause_s = FIRST_PAUSE_S
            self._trip(now)

    def succeeded(self) -> None:
        if self._state is State.CLOSED:
            self._failures = 0
        elif self._state is State.HALF_OPEN:
            self._under_way = max(0, self._under_way - 1)
            self._good += 1
            if self._good >= TRIALS:
                self._state, self._failures = State.CLOSED, 0
                self._closed_at = self._now

    def passed(self) -> None:
        """An attempt ended that says nothing of the region's health: it was full, or refused."""
        self._under_way = max(0, self._under_way - 1)

    def _trip(self, now: float) -> None:
        self._state = State.OPEN
        self._until = now + self._pause_s
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
