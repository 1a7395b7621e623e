"""A Worker's process: started, asked, limited, ended."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from core.config_workers import Workers
from core.errors import WorkerRefused
from edge.crew.watch import answers
from edge.workers.output import Reader
from edge.workers.runtime import Launch
from edge.workers.tree import limit, starting, taken_by, tree_of
from edge.workers.watch import End, Sample

START_S = 30.0
"""Two cores that other processes want need seconds for what takes one of them a tenth of one."""
START_CPU_S = 1.0
"""What a process may compute before it is up, beyond a turn."""
POLL_S = 0.005
STARTING_S = 0.1
"""Between two looks at one that starts: most are up before the first."""
OTHERS_EACH = 10
"""Samples from one search for processes that a Worker started to the next."""
ASK_S, ASK_UP_S = 0.1, 0.4
"""How long a sample waits for an answer, which then stays asked for; one question at the start."""
SILENT_S = 3600.0
LOWEST = 19
_OUT_OF_MEMORY = (
    "out of memory", "Cannot allocate memory", "MemoryError", "buffer allocation failed",
)  # fmt: skip


class Process:
    """Up once `start` returned. `listener` is the descriptor that it accepts requests on."""

    def __init__(self, launch: Launch, *, cwd: Path, control: Path, reader: Reader) -> None:
        self._launch = launch
        self._cwd = cwd
        self._control = control
        self._reader = reader
        self._process: asyncio.subprocess.Process
        self._reading: asyncio.Task[None]
        self._tree: list[psutil.Process] = []
        """Ours first; the last one runs the Worker."""
        self._asking: asyncio.Task[bool] | None = None
        """A question that is not answered yet. There is one at a time: whoever is busy finds it
        when its turn is over, however short the pauses between its turns are."""
        self._samples = 0
        self._usual = 0
        """Its priority when nothing is wrong."""
        self.halted_s = 0.0
        """For how long whoever paces it has kept it from computing."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def worker_pid(self) -> int:
        """Of the process that runs the Worker, once it is up."""
        return int(self._tree[-1].pid)

    async def start(self, listener: int, limits: Workers, clock: Callable[[], float]) -> Sample:
        """Returns a sample of it while it is empty: what its code took at its top is its own.
        Raises WorkerRefused with what it said."""
        self._process = await asyncio.create_subprocess_exec(
            *(*_leash(), *self._launch.argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self._cwd,
            env={"TZ": "UTC", **self._launch.environment},
            pass_fds=(listener, *self._launch.descriptors),
        )
        assert self._process.stdout is not None, "it is a pipe"
        self._reading = asyncio.create_task(self._reader.read(self._process.stdout))
        try:
            await self._wait_until_up(limits)
            self._tree = tree_of(self.pid) if self._launch.wrapped else [psutil.Process(self.pid)]
            self._usual = self._tree[-1].nice()
            limit(self._tree[-1].pid, limits.memory_mb)
            first = self._look(clock(), answered=True)
            self._check_memory(first.memory_mb, limits)
            return replace(first, memory_mb=min(first.memory_mb, self._launch.empty_mb))
        except BaseException:
            await self.end(0.0)
            raise

    async def _wait_until_up(self, limits: Workers) -> None:
        """Whoever waits for it at its socket may have it loop before it is up."""
        loop, most_cpu_s = asyncio.get_running_loop(), limits.turn_s + START_CPU_S
        end = loop.time() + START_S
        next_look = loop.time() + STARTING_S
        while not await answers(self._control, ASK_UP_S):
            if self._process.returncode is not None:
                await asyncio.wait({self._reading})
                if self._had_no_memory:
                    raise WorkerRefused("it filled its memory at its top (workers.memory_mb)")
                raise WorkerRefused(self._reader.last or "its process ended without a word")
            if loop.time() >= next_look:
                took = starting(self.pid, limits.memory_mb)
                next_look = loop.time() + STARTING_S
                self._check_memory(took.memory_mb, limits)
                if took.cpu_s > most_cpu_s:
                    raise WorkerRefused(
                        f"it was not up after {most_cpu_s:g} s of computing: there is a loop at its"
                        " top, or in what is asked of it first (workers.turn_s)"
                    )
                if loop.time() > end:
                    raise WorkerRefused(
                        f"it was not up after {START_S:g} s, {took.cpu_s:.1f} s of them"
                        " computing: either it waits at its top for what does not come, or this"
                        " machine is too busy to start it"
                    )
            await asyncio.sleep(POLL_S)

    def _check_memory(self, memory_mb: float, limits: Workers) -> None:
        used_mb = memory_mb - self._launch.empty_mb
        if used_mb > limits.memory_mb:
            raise WorkerRefused(
                f"it filled its memory at its top: {used_mb:.0f} MB, and the limit is"
                f" {limits.memory_mb} MB (workers.memory_mb)"
            )

    async def sample(self, now: Callable[[], float]) -> Sample | None:
        """None once it has ended."""
        answered = await self._answers()
        self._samples += 1
        try:
            return self._look(now(), answered=answered)
        except psutil.NoSuchProcess:
            return None

    async def _answers(self) -> bool:
        if self._asking is None:
            self._asking = asyncio.create_task(answers(self._control, SILENT_S))
        asking = self._asking
        await asyncio.wait({asking}, timeout=ASK_S)
        if not asking.done():
            return False
        self._asking = None
        return not asking.cancelled() and asking.result()

    async def _ask_no_more(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
            self._asking = None

    def _look(self, now: float, *, answered: bool) -> Sample:
        took = taken_by(self._tree)
        return Sample(now, took.cpu_s + self.halted_s, took.memory_mb, answered, self._others())

    def _others(self) -> int:
        """Processes below ours that are none of the tree. To find them takes a look at all of the
        machine's, and so is done with some samples only."""
        if not self._launch.wrapped or self._samples % OTHERS_EACH:
            return 0
        return len({*self._tree[0].children(recursive=True)}.difference(self._tree))

    def give_way(self) -> None:
        self._renice(LOWEST)

    def recover(self) -> None:
        """Where the system lets us: most users may only lower a priority."""
        self._renice(self._usual)

    def _renice(self, priority: int) -> None:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            worker = self._tree[-1]
            if worker.nice() != priority:
                worker.nice(priority)

    async def ended(self) -> End:
        """Wait for its end. Why it was, as far as it can be told."""
        code = await self._process.wait()
        await asyncio.wait({self._reading})
        await self._ask_no_more()
        if self._had_no_memory:
            return End("it filled its memory (workers.memory_mb)", "memory")
        if code < 0:
            return End(f"its process was killed by {signal.Signals(-code).name}")
        return End(f"its process ended with code {code}")

    @property
    def _had_no_memory(self) -> bool:
        return any(sign in self._reader.last for sign in _OUT_OF_MEMORY)

    async def end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after the grace. Idempotent."""
        if grace_s > 0:
            self._ask_to_end()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        self._signal(signal.SIGKILL)
        await self._process.wait()
        await asyncio.wait({self._reading})
        await self._ask_no_more()

    def _ask_to_end(self) -> None:
        """What wraps a Worker would end it at once."""
        with suppress(psutil.NoSuchProcess):
            if self._tree:
                self._tree[-1].terminate()
            else:
                self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)


def _leash() -> tuple[str, ...]:
    """Where the system has it: the kernel ends the process when its host dies."""
    if sys.platform != "linux" or (setpriv := shutil.which("setpriv")) is None:
        return ()
    return setpriv, "--pdeathsig", "KILL", "--"
