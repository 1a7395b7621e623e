"""One version of a Worker on this edge: its socket, and its process for as long as it is needed.

The host holds the listening socket, so that requests wait there instead of being refused while the
process starts, for the first time, after an idle while or after it was ended.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from core.config_workers import Workers
from core.errors import SkerryError
from core.pauses import Pauses
from edge.workers.bundle import Bundle
from edge.workers.logs import LogBook
from edge.workers.output import Reader
from edge.workers.process import START_S, Process
from edge.workers.runtime import Runtime, Seat
from edge.workers.sourcemap import SourceMap
from edge.workers.watch import End, GiveWay, Sample, Watch

_log = logging.getLogger("skerry.workers")

EVERY_S = 0.5
"""Between two samples of a process."""
GRACE_S = 30.0
"""How long requests of a version that was replaced may go on."""
BACKLOG = 512
PAUSES = Pauses(first_s=0.1, most_s=10.0, settled_s=10.0)
SeatMaker = Callable[[Path, int, Path], Seat]
"""A seat for (folder, listener, control)."""


class Unit:
    def __init__(
        self,
        *,
        version: str,
        bundle: Bundle,
        runtime: Runtime,
        book: LogBook,
        limits: Workers,
        root: Path,
        serial: int,
        seat: SeatMaker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`serial` is of this unit alone, among all of the host's life."""
        self.version = version
        self.bundle = bundle
        self.socket = root / f"u{serial}.sock"
        self.used = root / f"u{serial}.used"
        self.starts = 0
        self._runtime = runtime
        self._book = book
        self._limits = limits
        self._folder = root / f"u{serial}"
        self._control = root / f"c{serial}.sock"
        self._seat = seat
        self._clock = clock
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.socket))
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self.used.touch()
        self._process: Process | None = None
        self._seated: Seat | None = None
        self._empty: Sample
        self._up = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.bundle.settings.name

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def control(self) -> Path:
        return self._control

    async def start(self) -> None:
        """Start the process, and keep it from now on. Raises WorkerRefused, ConfigError."""
        await self._start()
        self._keeper = asyncio.create_task(self._keep())

    async def wake(self) -> None:
        """Have the process started where it is not up: by knocking, as a request does. Raises
        OSError."""
        self.used.touch()
        if self._process is None:
            _, knock = await asyncio.open_unix_connection(str(self.socket))
            knock.close()
            async with asyncio.timeout(START_S):
                await self._up.wait()

    async def close(self, grace_s: float = GRACE_S) -> None:
        """End it, after what it is answering now. Idempotent."""
        self._listener.close()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        if self._process is not None:
            process, self._process = self._process, None
            await process.end(grace_s)
        if self._seated is not None:
            await self._runtime.release(self._seated)
        for path in (self.socket, self.used, self._control):
            path.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        self._control.unlink(missing_ok=True)
        seat = self._seat(self._folder, self._listener.fileno(), self._control)
        self._seated = seat
        launch = await self._runtime.prepare(seat, self.bundle)
        reader = Reader(
            self._book, self.version, seat.mark, self.bundle.modules[0].name, _places(self.bundle)
        )
        process = Process(launch, cwd=self._folder, control=self._control, reader=reader)
        self.starts += 1
        self._empty = await process.start(self._listener.fileno(), self._limits, self._clock)
        self._process = process
        self._up.set()

    async def _keep(self) -> None:
        pause_s, began, failures = 0.0, self._clock(), 0
        while True:
            if self._process is None:
                await self._asked_for()
                began = self._clock()
                try:
                    await self._start()
                except SkerryError as error:
                    self._say(f"it does not start: {error}")
                    failures += 1
                    if failures > 1:  # at first it may be what one caller asked for
                        self._turn_away()
            if self._process is not None:
                failures = 0
                reason = await self._watched(self._process)
                self._process = None
                self._up.clear()
                if reason is None:
                    self._say(f"nobody asked for {self._limits.idle_s:g} s: asleep until one does")
                    pause_s = 0.0
                    continue
                self._say(f"ended: {reason}; the next request starts it again")
                _log.warning("worker ended name=%s version=%s", self.name, self.version)
            pause_s = PAUSES.after(pause_s, self._clock() - began)
            await asyncio.sleep(pause_s)

    async def _watched(self, process: Process) -> str | None:
        """Until it has ended. Why it did; None where nobody needed it any more."""
        turn_ms = self.bundle.settings.turn_ms
        watch = Watch(self._limits, self._empty, None if turn_ms is None else turn_ms / 1000)
        ended = asyncio.create_task(process.ended())
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=EVERY_S)
                sample = None if ended.done() else await process.sample(self._clock)
                if sample is None:
                    break
                verdict = watch.see(sample)
                if isinstance(verdict, GiveWay):
                    process.give_way()
                elif isinstance(verdict, End):
                    await process.end(0.0)
                    return verdict.reason
                elif self._idle():
                    await process.end(GRACE_S)
                    return None
            return await ended
        finally:
            ended.cancel()

    def _idle(self) -> bool:
        return time.time() - self.used.stat().st_mtime > self._limits.idle_s

    async def _asked_for(self) -> None:
        """Until somebody waits at the socket."""
        loop, asked = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._listener, asked.set)
        try:
            await asked.wait()
        finally:
            loop.remove_reader(self._listener)

    def _turn_away(self) -> None:
        """Whoever waits is not kept waiting for what does not come."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection.close()

    def _say(self, what: str) -> None:
        self._book.say(self.version, "host", what)


def _places(bundle: Bundle) -> SourceMap | None:
    if not bundle.source_map:
        return None
    try:
        return SourceMap(bundle.source_map)
    except (msgspec.MsgspecError, ValueError):
        return None  # stacks then name places of the bundle
