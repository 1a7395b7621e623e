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
from edge.workers.pacer import Pacer
from edge.workers.process import START_S, Process
from edge.workers.rest import Cause, Conduct, Rest, Rests
from edge.workers.runtime import Runtime, Seat
from edge.workers.sourcemap import SourceMap
from edge.workers.turning_away import resting, turn_away
from edge.workers.watch import End, GiveWay, Recover, Sample, Watch

_log = logging.getLogger("skerry.workers")

EVERY_S, SOON_S = 0.5, 0.1
"""Between two samples of a process; while it is silent."""
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
        tenant: str,
        bundle: Bundle,
        runtime: Runtime,
        book: LogBook,
        limits: Workers,
        root: Path,
        serial: int,
        seat: SeatMaker,
        pacer: Pacer,
        changed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tenant` is for whom it acts. `serial` is of this unit alone, among all of the host's
        life. `changed` is called when a rest begins and when it is over."""
        self.version = version
        self.tenant = tenant
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
        self._pacer = pacer
        self._changed = changed
        self._clock = clock
        self._conduct = Conduct(Rests(most_s=limits.rest_s))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.socket))
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self.used.touch()
        self._process: Process | None = None
        self._seated: Seat | None = None
        self._empty: Sample
        self._reader: Reader
        self._began = 0.0
        self._up = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self.rest: Rest | None = None

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
        self._began = self._clock()
        await self._start()
        self._keeper = asyncio.create_task(self._keep())

    async def wake(self) -> None:
        """Have the process started where it is not up: by knocking, as a request does. Raises
        OSError, WorkerResting."""
        self.used.touch()
        if self.rest is not None:
            raise resting(self.name, self.rest)
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
            await self._process.end(grace_s)
            self._process = None  # only now: who closes may be cancelled, and another close again
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
        self._reader = Reader(
            self._book, self.version, seat.mark, self.bundle.modules[0].name, _places(self.bundle)
        )
        process = Process(launch, cwd=self._folder, control=self._control, reader=self._reader)
        self.starts += 1
        self._empty = await process.start(self._listener.fileno(), self._limits, self._clock)
        self._process = process
        self._up.set()

    async def _keep(self) -> None:
        pause_s = 0.0
        while True:
            end = await self._once()
            self._process = None
            self._up.clear()
            if end is None:
                self._say(f"nobody asked for {self._limits.idle_s:g} s: asleep until one does")
                pause_s = 0.0
                continue
            _log.warning("worker ended name=%s version=%s", self.name, self.version)
            rest_s = 0.0 if end.cause is None else self._conduct.ended()
            if end.cause is not None and rest_s > 0:
                await self._rest(end.reason, end.cause, rest_s)
                pause_s = 0.0
                continue
            self._say(f"ended: {end.reason}; the next request starts it again")
            pause_s = PAUSES.after(pause_s, self._clock() - self._began)
            await asyncio.sleep(pause_s)

    async def _once(self) -> End | None:
        """One life of the process, from the next request on where it is not up. Why it ended; None
        where nobody needed it any more."""
        if self._process is None:
            await self._asked_for()
            self._began = self._clock()
            try:
                await self._start()
            except SkerryError as error:
                return End(f"it does not start: {error}", "start")
            except OSError as error:  # a disk that is full, no descriptor left: not its doing
                return End(f"its machine could not start it: {error.strerror}")
        assert self._process is not None, "it has started"
        end = await self._watched(self._process)
        self._conduct.lived(self._clock() - self._began, answered=self._reader.runs > 0)
        return end

    async def _rest(self, reason: str, cause: Cause, rest_s: float) -> None:
        ends = self._conduct.ends
        rest = self.rest = Rest(time.time() + rest_s, cause, ends)
        self._say(
            f"ended: {reason}; its end number {ends} in a row, so it rests for {rest_s:g} s:"
            " whoever asks it is refused until then (workers.rest_s), unless it is deployed again"
        )
        self._changed()
        try:
            await turn_away(self._listener, rest_s, lambda: resting(self.name, rest))
        finally:
            self.rest = None
        self._changed()

    async def _watched(self, process: Process) -> End | None:
        """Until it has ended. Why it did; None where nobody needed it any more."""
        turn_ms = self.bundle.settings.turn_ms
        self._pacer.join(process)
        watch = Watch(self._limits, self._empty, None if turn_ms is None else turn_ms / 1000)
        ended = asyncio.create_task(process.ended())
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=SOON_S if watch.hasty else EVERY_S)
                sample = None if ended.done() else await process.sample(self._clock)
                if sample is None:
                    break
                verdict = watch.see(sample)
                if isinstance(verdict, GiveWay):
                    process.give_way()
                elif isinstance(verdict, Recover):
                    process.recover()
                elif isinstance(verdict, End):
                    await process.end(0.0)
                    return verdict
                elif sample.answered and self._idle():  # who holds its thread is asked for
                    await process.end(GRACE_S)
                    return None
            return await ended
        finally:
            self._pacer.leave(process)
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

    def _say(self, what: str) -> None:
        self._book.say(self.version, "host", what)


def _places(bundle: Bundle) -> SourceMap | None:
    if not bundle.source_map:
        return None
    try:
        return SourceMap(bundle.source_map)
    except (msgspec.MsgspecError, ValueError):
        return None  # stacks then name places of the bundle
