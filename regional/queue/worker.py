"""Runs queued requests where nobody else wants the room, and gives way when somebody does.

It looks at the region ten times a second while it has something running or to run. An item that
gives way keeps its place and begins again later; what its prompt left in the prefix cache is found.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from core.errors import InternalError
from core.events import Event, event_decoder
from core.types import GenerateRequest
from regional.queue.kept import KeptQueue
from regional.queue.rules import Again, Room, ended, room
from regional.queue.store import Job

log = logging.getLogger("skerry.queue")

LOOK_S, IDLE_S, SWEEP_S = 0.1, 1.0, 60.0


class Server(Protocol):
    """What serves a request: the router."""

    async def serve(
        self, request: GenerateRequest, write: Callable[[bytes], Awaitable[None]]
    ) -> None: ...


class Worker:
    """`look(held)` is the region now, while the queue holds so many sequences."""

    def __init__(
        self,
        kept: KeptQueue,
        server: Server,
        *,
        look: Callable[[int], Room],
        deadline_s: float,
    ) -> None:
        self._kept = kept
        self._server = server
        self._look = look
        self._deadline_s = deadline_s
        self._running: dict[asyncio.Task[None], Job] = {}
        self._poked = asyncio.Event()
        self._nothing_until = 0.0
        """The disk has nothing that may run, until this or a poke; by the loop's clock."""
        self.waiting = 0
        """Requests without an answer, as of the last look at the disk."""

    @property
    def running(self) -> int:
        return len(self._running)

    def poke(self) -> None:
        """Something was queued."""
        self._poked.set()

    async def run(self) -> None:
        """Until cancelled; then what runs is queued again, and that is on disk."""
        loop = asyncio.get_running_loop()
        sweep_at, recovered = loop.time(), False
        try:
            while True:
                try:
                    if not recovered:
                        await self._kept.recover()
                        recovered = True
                    if loop.time() >= sweep_at:
                        sweep_at = loop.time() + SWEEP_S
                        await self._kept.sweep()
                    await self._turn()
                except InternalError as error:
                    log.error("%s", error.message)
                    self._nothing_until = loop.time() + IDLE_S
                await self._pause(loop.time())
        finally:
            await self._stop(len(self._running))

    async def _turn(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._poked.is_set():
            self._poked.clear()
            self._nothing_until = now
        more = room(self._look(len(self._running)))
        if more < 0:
            await self._stop(-more)
        elif more > 0 and now >= self._nothing_until:
            jobs = await self._kept.claim(more)
            self.waiting = await self._kept.waiting()
            if len(jobs) < more:
                self._nothing_until = now + IDLE_S
            for job in jobs:
                task = asyncio.create_task(self._play(job))
                self._running[task] = job
                task.add_done_callback(self._done)

    async def _pause(self, now: float) -> None:
        busy = bool(self._running) or now >= self._nothing_until
        try:
            async with asyncio.timeout(LOOK_S if busy else IDLE_S):
                await self._poked.wait()
        except TimeoutError:
            return

    async def _stop(self, count: int) -> None:
        """Let the last `count` begun give way."""
        tasks = list(self._running)[len(self._running) - count :]
        for task in tasks:
            task.cancel()
        if tasks:
            log.info("%d queued requests give way", len(tasks))
            await asyncio.wait(tasks)
            self._nothing_until = 0.0

    async def _play(self, job: Job) -> None:
        events: list[Event] = []
        decoder = event_decoder()

        async def write(data: bytes) -> None:
            events.extend(decoder.feed(data))

        outcome = ended(events, job.tries)  # unless it comes further
        request = msgspec.structs.replace(job.request, deadline_s=self._deadline_s)
        try:
            await self._server.serve(request, write)
            outcome = ended(events, job.tries)
        except asyncio.CancelledError:
            outcome = Again(job.tries, 0.0)  # to give way is no failure
            raise
        finally:
            # Cancelled or not, the disk has to know: whoever stops us waits for it.
            await asyncio.shield(self._kept.end(job, outcome))

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a queued request was lost until the next start: %s", error)
        self._poked.set()  # its room is free
