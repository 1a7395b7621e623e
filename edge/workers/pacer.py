"""Lets Workers that hold their threads compute by slices while the machine is crowded. On Linux;
elsewhere nobody is paced.

By SIGSTOP and SIGCONT, which need no right, and in the kernel's idle class where we may take them
out of it again. It takes both: either alone leaves a neighbour's p99 where it was.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from edge.workers.cores import Cores, cores_here
from edge.workers.pacing import GO_S, HALT_S, Hold, Look, Room

LOOK_S = 0.02
ROOM_LOOKS = 5
"""Looks at the Workers from one look at the machine to the next."""
USUAL_NICE_LIMIT, CAP_SYS_NICE = 20, 23
_WAITS = b"\nvoluntary_ctxt_switches:"


class Pacable(Protocol):
    """`halted_s` is added to: for how long it was kept from computing."""

    halted_s: float

    @property
    def worker_pid(self) -> int: ...


class _Paced:
    def __init__(self, process: Pacable, clock: Callable[[], float]) -> None:
        """Raises OSError where it has ended."""
        self._pid = pid = process.worker_pid
        self._process = process
        self._clock = clock
        self._cpu_clock = (~pid << 3) | 2  # as clock_getcpuclockid(3) makes it
        self._pidfd = os.pidfd_open(pid)
        self._halted_at: float | None = None
        self._lowered = False
        self.task: asyncio.Task[None] | None = None
        try:
            self._status = os.open(f"/proc/{pid}/status", os.O_RDONLY)
        except OSError:
            os.close(self._pidfd)
            raise
        try:
            self.begin()
        except OSError:
            self.close()
            raise

    def begin(self) -> None:
        """From now on. Raises OSError where it has ended."""
        self.cpu_s = self.cpu()
        self.hold = Hold(Look(self._clock(), self.cpu_s, self.waits()))

    def cpu(self) -> float:
        """Exact, also of a process that runs at this moment."""
        return time.clock_gettime(self._cpu_clock)

    def waits(self) -> int:
        text = os.pread(self._status, 8192, 0)
        begin = text.find(_WAITS)
        if begin < 0:
            raise ProcessLookupError("it has ended")
        begin += len(_WAITS)
        return int(text[begin : text.index(b"\n", begin)])

    def lower(self) -> None:
        """To the idle class, until `close` or `restore`."""
        self._to_class(os.SCHED_IDLE)
        self._lowered = True

    def restore(self) -> None:
        """Idempotent."""
        if self._lowered:
            self._lowered = False
            with suppress(OSError):  # it has ended
                self._to_class(os.SCHED_OTHER)

    def _to_class(self, policy: int) -> None:
        signal.pidfd_send_signal(self._pidfd, 0)  # its id may be another one's by now
        os.sched_setscheduler(self._pid, policy, os.sched_param(0))

    def halt(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGSTOP)
        self._halted_at = self._clock()

    def go_on(self) -> None:
        """Idempotent."""
        if self._halted_at is not None:
            self._process.halted_s += self._clock() - self._halted_at
            self._halted_at = None
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)

    def close(self) -> None:
        self.restore()
        self.go_on()
        os.close(self._pidfd)
        os.close(self._status)


class Pacer:
    """Of all Workers of one host."""

    def __init__(
        self,
        cores: Cores | None = None,
        room: Room | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._cores = cores or cores_here()
        self._room = room or Room(self._cores.count)
        self._last_used_s = 0.0
        self._paced: dict[Pacable, _Paced] = {}
        self._somebody = asyncio.Event()
        self._may_restore = sys.platform == "linux" and _may_raise_priorities()

    def join(self, process: Pacable) -> None:
        if sys.platform != "linux":
            return
        with suppress(OSError):  # it has ended already
            self._paced[process] = _Paced(process, self._clock)
            self._somebody.set()

    def leave(self, process: Pacable) -> None:
        """It goes on. Idempotent."""
        paced = self._paced.pop(process, None)
        if paced is not None:
            if paced.task is not None:
                paced.task.cancel()
            paced.close()
        if not self._paced:
            self._somebody.clear()

    async def run(self) -> None:
        while True:
            await self._somebody.wait()
            began, used_s, own_s = self._clock(), self._used_s(), 0.0
            for _ in range(ROOM_LOOKS):
                await asyncio.sleep(LOOK_S)
                own_s += self._look()
            self._room.see(self._clock() - began, self._used_s() - used_s, own_s)

    def _used_s(self) -> float:
        """The last figure where there is none at this moment."""
        with suppress(OSError, ValueError):
            self._last_used_s = self._cores.used_s()
        return self._last_used_s

    def _look(self) -> float:
        """CPU seconds of those who hold their threads."""
        own_s = 0.0
        for paced in list(self._paced.values()):
            with suppress(OSError):
                own_s += self._see(paced)
        holding = [one for one in self._paced.values() if one.hold.holds]
        if self._room.crowded(len(holding)):
            for one in holding:
                if one.task is None:
                    one.task = asyncio.create_task(self._pace(one))
        return own_s

    def _see(self, paced: _Paced) -> float:
        before, paced.cpu_s = paced.cpu_s, paced.cpu()
        if paced.task is None:
            paced.hold.see(self._clock(), paced.cpu_s, paced.waits)
        return paced.cpu_s - before if paced.hold.held_s > 0 else 0.0

    async def _pace(self, paced: _Paced) -> None:
        """Until it waits for something, or there is room again."""
        try:
            waits = paced.waits()
            if self._may_restore:
                with suppress(PermissionError):
                    paced.lower()
            while self._room.crowded(1):
                paced.halt()
                await asyncio.sleep(HALT_S)
                before, waits = waits, paced.waits()
                if waits > before + 1:  # the halt is one
                    break
                paced.go_on()
                await asyncio.sleep(GO_S)
            paced.begin()
        except OSError:
            pass  # it has ended
        finally:
            paced.restore()
            paced.go_on()
            paced.task = None


def _may_raise_priorities() -> bool:
    """To the usual one: by RLIMIT_NICE (20 for nice 0, see getrlimit(2)) or CAP_SYS_NICE."""
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    if limit >= USUAL_NICE_LIMIT or limit == resource.RLIM_INFINITY:
        return True
    status = Path("/proc/self/status").read_text(encoding="ascii")
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> CAP_SYS_NICE & 1)
