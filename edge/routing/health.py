"""An edge's own judgement of a region, beside what the region says of itself. Pure, time passed in.

Failed attempts are `breaker`'s. **Slow start**: a region that comes back bears a growing part of
its fair load over ten seconds, because its caches are empty and all edges see it come back at
once. **Flapping**: a region that is lost again within a minute of its last loss must be heard for a
while before it is trusted, each time for longer. A long prefill is no sign of ill health: only
failed attempts, cut streams and silence are.
"""

from __future__ import annotations

from dataclasses import dataclass

RAMP_S = 10.0
RAMP_FIRST = 0.1
"""Share of its fair load that a region bears at once when it comes back."""
GATHER_S = 120.0
FLAP_S = 60.0
TRUST_S, LONGEST_TRUST_S = 1.0, 4.0
FADE_S = 1.0
TRIP_WINDOW = 12
"""Measured round trips of which the least counts."""


@dataclass(slots=True)
class Recovery:
    """Slow start and flapping of one region. A region heard for the first time is whole at once:
    nobody's load has been moved away from it."""

    lost_at: float | None = None
    flaps: int = 0
    up_since: float | None = None
    """None while it is lost."""

    def heard(self, now: float) -> None:
        if self.up_since is None:
            self.up_since = now if self.lost_at is not None else float("-inf")

    def lost(self, now: float) -> None:
        if self.up_since is None:
            return
        again = self.lost_at is not None and now - self.lost_at < FLAP_S
        self.flaps = self.flaps + 1 if again else 0
        self.lost_at, self.up_since = now, None

    def trusted(self, now: float) -> bool:
        if self.up_since is None:
            return False
        if not self.flaps:
            return True
        wait_s = min(TRUST_S * 2.0 ** (self.flaps - 1), LONGEST_TRUST_S)
        return bool(now - self.up_since >= wait_s)

    def returned(self, now: float) -> bool:
        """Whether it came back a short while ago and has its keys to gather again."""
        return self.up_since is not None and now - self.up_since < GATHER_S

    def ramp(self, now: float) -> float:
        """Share of its fair load that the region should bear, 0.1 to 1."""
        if self.up_since is None:
            return 1.0  # suspect: used last anyway
        return min(1.0, max(RAMP_FIRST, (now - self.up_since) / RAMP_S))


@dataclass(slots=True)
class Outgoing:
    """Seconds of work that this edge sent to a region and that its status cannot show yet: each
    send halves every `FADE_S`, and counts no more once its prompt has been read."""

    work_s: float = 0.0
    at: float = 0.0

    def add(self, work_s: float, now: float) -> None:
        self.work_s = self.left(now) + work_s
        self.at = now

    def take_back(self, work_s: float, sent_at: float, now: float) -> None:
        """The prompt of a send has been read: what is left of it counts no more."""
        left = self.left(now) - work_s * 0.5 ** (max(0.0, now - sent_at) / FADE_S)
        self.work_s, self.at = max(0.0, left), now

    def left(self, now: float) -> float:
        if self.work_s <= 0.0:
            return 0.0
        gone = max(0.0, now - self.at)
        return float(self.work_s * 0.5 ** (gone / FADE_S))


class RoundTrip:
    """The least of the last measured round trips: what the way itself takes, without anybody's
    queue. `guess_s` until there is one."""

    def __init__(self, guess_s: float) -> None:
        self._guess_s = guess_s
        self._measured: list[float] = []

    def measured(self, seconds: float) -> None:
        self._measured = [*self._measured[-(TRIP_WINDOW - 1) :], seconds]

    @property
    def seconds(self) -> float:
        return min(self._measured, default=self._guess_s)
