"""One region as one edge sees it, without I/O: fed with frames and outcomes, read as a view."""

from __future__ import annotations

from collections.abc import Sequence

from core.status import STALE_S, RegionStatus
from core.types import ModelName, RegionName
from edge.routing.breaker import Breaker
from edge.routing.cache import Digest, RegionCache
from edge.routing.health import Outgoing, Recovery, RoundTrip
from edge.routing.view import RegionView
from edge.routing.weights import WEIGHTS, Weights


class Heard:
    """What a region says of itself, as it came; the same for every edge that hears it."""

    def __init__(self) -> None:
        self.status: RegionStatus | None = None
        self.at = 0.0
        self.connected = False
        self.digest = Digest()
        self.recovery = Recovery()

    def take(self, status: RegionStatus, now: float) -> None:
        self.connected = True
        self.at = now
        self.recovery.heard(now)
        old = self.status
        if old is None or old.epoch != status.epoch:
            self.digest.clear()
        if old is None or old.epoch != status.epoch or old.sequence < status.sequence:
            self.status = status

    def cut(self, now: float) -> None:
        """Its stream is over."""
        self.connected = False
        self.recovery.lost(now)


class SeenRegion:
    """A region in one edge's eyes: what it says, and what this edge knows better."""

    def __init__(
        self,
        name: RegionName,
        trip_s: float,
        configured: frozenset[ModelName],
        weight: int,
        heard: Heard,
        weights: Weights = WEIGHTS,
    ) -> None:
        self.name = name
        self.heard = heard
        self.cache = RegionCache(heard.digest)
        self.breaker = Breaker()
        self.outgoing = Outgoing()
        self.trip = RoundTrip(trip_s)
        self._drain = weights.drain
        self._done_s = 0.0
        self._done_at = 0.0
        self._configured = configured
        self._weight = weight

    def sent(self, ids: Sequence[bytes], work_s: float, now: float) -> None:
        """A request goes there that its status cannot show yet."""
        self.outgoing.add(work_s, now)
        self.breaker.sent(now)
        self.cache.sent(ids, now)

    def read(self, work_s: float, sent_at: float, now: float) -> None:
        """A prompt that was sent there has been read, or never will be: the last frame still
        counts it, if it was sent before that frame came."""
        self.outgoing.take_back(work_s, sent_at, now)
        if self._done_at != self.heard.at:
            self._done_s, self._done_at = 0.0, self.heard.at
        if sent_at < self.heard.at:
            self._done_s += work_s

    def view(self, now: float, stale_s: float = STALE_S) -> RegionView:
        heard = self.heard
        age = now - heard.at if heard.status is not None else None
        here = heard.connected and age is not None and age < stale_s
        if not here:
            heard.recovery.lost(now)
        # The frame was half a round trip old when it came. Own prompts that are known to have
        # been read since are a part of what was worked off, and may be more than the estimate.
        drained_s = self._drain * ((age or 0.0) + self.trip.seconds / 2)
        if self._done_at == heard.at:
            drained_s = max(drained_s, self._done_s)
        return RegionView(
            name=self.name,
            round_trip_s=self.trip.seconds,
            configured=self._configured,
            fresh=here and heard.recovery.trusted(now),
            age_s=age,
            status=heard.status,
            cache=self.cache,
            broken=self.breaker.open(now),
            sent_s=self.outgoing.left(now),
            drained_s=drained_s,
            ramp=heard.recovery.ramp(now),
            returned=heard.recovery.returned(now),
            weight=(heard.status.more.weight if heard.status else 0) or self._weight,
            at=now,
        )
