"""Runs what is due; only on the first edge of a topology, since a timer is of no edge."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Callable

import aiohttp

from core.errors import WorkerResting
from edge.workers.host import Host
from edge.workers.logs import LogBook
from edge.workers.unit import Unit

MINUTE_S = 60
PATIENCE_S = 900.0
"""How long a handler may take, its `waitUntil` with it."""


class Timers:
    def __init__(self, host: Host, *, clock: Callable[[], float] = time.time) -> None:
        self._host = host
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled, then what runs is given up."""
        last = 0
        async with asyncio.TaskGroup() as tasks:
            while True:
                now = self._clock()
                await asyncio.sleep(MINUTE_S - now % MINUTE_S)
                minute = int(self._clock() / MINUTE_S + 0.5) * MINUTE_S  # may wake a little early
                if minute <= last:  # or the clock was set back: no minute runs twice
                    continue
                last = minute
                for unit, text, book in self.due(minute):
                    tasks.create_task(trigger(unit, text, minute, book))

    def due(self, minute: int) -> list[tuple[Unit, str, LogBook]]:
        """What runs in the minute that begins at the Unix time `minute`."""
        at = dt.datetime.fromtimestamp(minute, dt.UTC)
        return [(unit, cron.text, book) for unit, cron, book in self._host.crons() if cron.due(at)]


async def trigger(unit: Unit, cron: str, at: int, book: LogBook) -> bool:
    """Run the handler for `cron`. Whether it went well; if not, the log says so."""
    try:
        await unit.wake()
        async with (
            asyncio.timeout(PATIENCE_S),
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(unit.control))) as session,
            session.post("http://control/scheduled", json={"cron": cron, "time": at * 1000}) as got,
        ):
            page = await got.json(content_type=None) if got.status == 200 else {}
            outcome = str(page.get("outcome", "exception"))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, WorkerResting) as error:
        outcome = str(error) or type(error).__name__
    if outcome != "ok":
        book.say(unit.version, "host", f"the timer {cron!r} failed: {outcome}")
    return outcome == "ok"
