"""The live view of all regions: one reader of a status stream each, and immutable snapshots.

Besides what a region says of itself, the view holds what this edge knows better: the measured
round trip, what it sent there a moment ago, failed attempts, and how long the region is back.

A region is fresh while its stream stands and its last frame is younger than `STALE_S`, by this
process's monotonic clock: no clock time crosses the wire. A cut stream makes it suspect at once;
the reader connects again with back-off for as long as the edge lives.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from core.config import Edge, Topology
from core.errors import RequestError
from core.status import STALE_S, RegionPrefixes, RegionStatus, Told
from core.types import ModelName, RegionName
from edge.region_client import RegionClient
from edge.routing.cache import counts_of
from edge.routing.hot import HotSet, HotSets
from edge.routing.seen import Heard, SeenRegion
from edge.routing.view import RegionView

_log = logging.getLogger("skerry.regions")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Back-off between attempts to reach a region; it must take traffic again within 10 s (B23)."""
SETTLE_S = 1.0
"""Between two decisions on the hot set."""
PING_PAUSES_S = (0.2, 0.2, 0.5, 1.0)
"""Before the first measurements of a round trip; then every `PING_EVERY_S`."""
PING_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Sent:
    """An attempt under way; `work_s`: seconds of reading that it brings."""

    region: RegionName
    ids: Sequence[bytes]
    work_s: float
    at: float


class Regions:
    """Reads every region's status while `run` runs; `view` is valid at any time."""

    def __init__(
        self,
        topology: Topology,
        edge: Edge,
        clients: Mapping[RegionName, RegionClient],
        *,
        clock: Callable[[], float] = time.monotonic,
        stale_s: float = STALE_S,
        told: Callable[[RegionStatus], None] = lambda _: None,
    ) -> None:
        self._clients = clients
        self._clock = clock
        self._stale_s = stale_s
        self._told = told
        self._hot = HotSets(len(topology.regions))
        self._settled_at = float("-inf")
        self._seen = {
            name: SeenRegion(
                name,
                edge.round_trip_ms.get(name, 0.0) / 1000.0,
                frozenset(ModelName(n.model) for n in topology.region(name).nodes),
                topology.region(name).weight,
                Heard(),
            )
            for name in clients
        }

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as readers:
            for name in self._clients:
                readers.create_task(self._listen(name))
                readers.create_task(self._measure(name))

    def view(self) -> tuple[RegionView, ...]:
        """All regions of the topology, as known now."""
        now = self._clock()
        return tuple(seen.view(now, self._stale_s) for seen in self._seen.values())

    def hot(self) -> HotSet:
        """What route keys are made with."""
        now = self._clock()
        if now - self._settled_at >= SETTLE_S:
            self._settled_at = now
            self._hot.settle(now)
        return self._hot.current

    def fresh_statuses(self) -> Iterator[RegionStatus]:
        """The newest frame of each region that is not suspect."""
        for region in self.view():
            if region.fresh and region.status is not None:
                yield region.status

    def hear(self, told: Told) -> None:
        """One frame of a region's stream."""
        now = self._clock()
        seen = self._seen.get(told.region)
        if seen is None:
            return  # a region that the topology does not give us
        if isinstance(told, RegionPrefixes):
            seen.heard.digest.take(told)
            if told.total:
                self._hot.take(told.region, counts_of(told), told.total, now)
        else:
            seen.heard.take(told, now)
            self._told(told)

    def sent(self, region: RegionName, ids: Sequence[bytes], work_s: float) -> Sent:
        """This edge sends a request there; its status cannot show it yet."""
        now = self._clock()
        self._seen[region].sent(ids, work_s, now)
        return Sent(region, ids, work_s, now)

    def answered(self, sent: Sent) -> None:
        """Its first delta has come."""
        seen = self._seen[sent.region]
        seen.breaker.succeeded()
        seen.read(sent.work_s, sent.at, self._clock())

    def failed(self, sent: Sent, *, ill: bool) -> None:
        """The attempt came to nothing; `ill`: by the region's own fault."""
        seen, now = self._seen[sent.region], self._clock()
        seen.read(sent.work_s, sent.at, now)
        seen.cache.refused(sent.ids)
        if ill:
            seen.breaker.failed(now)
        else:
            seen.breaker.passed()

    async def _measure(self, name: RegionName) -> None:
        """Keep the moving minimum of round trips up to date."""
        pauses = iter(PING_PAUSES_S)
        while True:
            try:
                self._seen[name].trip.measured(await self._clients[name].ping())
            except RequestError as error:
                _log.debug("round trip unknown region=%s why=%s", name, error.message)
            await asyncio.sleep(next(pauses, PING_EVERY_S))

    async def _listen(self, name: RegionName) -> None:
        seen, pause, complained = self._seen[name], FIRST_PAUSE_S, False
        while True:
            try:
                async with aclosing(self._clients[name].statuses()) as frames:
                    async for told in frames:
                        if not seen.heard.connected:
                            _log.info("region heard region=%s epoch=%s", name, told.epoch)
                        self.hear(told)
                        pause, complained = FIRST_PAUSE_S, False
                why = "its status stream ended"
            except RequestError as error:
                why = error.message
            seen.heard.cut(self._clock())
            if not complained:
                _log.warning("region silent region=%s why=%s", name, why)
                complained = True
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, LONGEST_PAUSE_S)
