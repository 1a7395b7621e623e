"""The live view of all regions: one reader of a status stream each, and immutable snapshots.

A region is fresh while its stream stands and its last frame is younger than `STALE_S`, by this
process's monotonic clock: no clock time crosses the wire. A cut stream makes it suspect at once;
the reader connects again with back-off for as long as the edge lives.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from core.config import Edge, Topology
from core.errors import RequestError
from core.status import STALE_S, RegionStatus
from core.types import ModelName, RegionName
from edge.region_client import RegionClient
from edge.routing.placement import RegionView

_log = logging.getLogger("skerry.regions")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Back-off between attempts to reach a region; it must take traffic again within 10 s (B23)."""


@dataclass(slots=True)
class _Heard:
    """What is known of one region; written by its reader only."""

    status: RegionStatus | None = None
    at: float = 0.0
    connected: bool = False

    def take(self, status: RegionStatus, now: float) -> None:
        self.connected = True
        self.at = now
        old = self.status
        if old is None or old.epoch != status.epoch or old.sequence < status.sequence:
            self.status = status


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
    ) -> None:
        self._clients = clients
        self._clock = clock
        self._stale_s = stale_s
        self._heard = {name: _Heard() for name in clients}
        self._round_trip_s = {name: edge.round_trip_ms.get(name, 0.0) / 1000.0 for name in clients}
        self._configured = {
            name: frozenset(ModelName(n.model) for n in topology.region(name).nodes)
            for name in clients
        }

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as readers:
            for name in self._clients:
                readers.create_task(self._listen(name))

    def view(self) -> tuple[RegionView, ...]:
        """All regions of the topology, as known now."""
        now = self._clock()
        return tuple(self._seen(name, heard, now) for name, heard in self._heard.items())

    def fresh_statuses(self) -> Iterator[RegionStatus]:
        """The newest frame of each region that is not suspect."""
        for region in self.view():
            if region.fresh and region.status is not None:
                yield region.status

    def _seen(self, name: RegionName, heard: _Heard, now: float) -> RegionView:
        age = now - heard.at if heard.status is not None else None
        return RegionView(
            name=name,
            round_trip_s=self._round_trip_s[name],
            configured=self._configured[name],
            fresh=heard.connected and age is not None and age < self._stale_s,
            age_s=age,
            status=heard.status,
        )

    async def _listen(self, name: RegionName) -> None:
        heard, pause, complained = self._heard[name], FIRST_PAUSE_S, False
        while True:
            try:
                async with aclosing(self._clients[name].statuses()) as frames:
                    async for status in frames:
                        if not heard.connected:
                            _log.info("region heard region=%s epoch=%s", name, status.epoch)
                        heard.take(status, self._clock())
                        pause, complained = FIRST_PAUSE_S, False
                why = "its status stream ended"
            except RequestError as error:
                why = error.message
            heard.connected = False
            if not complained:
                _log.warning("region silent region=%s why=%s", name, why)
                complained = True
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, LONGEST_PAUSE_S)
