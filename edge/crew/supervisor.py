"""The parent of an edge's worker processes: all on one address, each started again when it ends.

It carries no traffic. It binds the address without listening, so that the port is the edge's for
as long as it lives; workers share it by SO_REUSEPORT and the kernel spreads connections over them.
A worker that no longer answers is killed, and started again like one that ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from core import log
from core.config import World
from core.orders import RETIRE
from core.pauses import PAUSES, Pauses
from core.public_tls import public_of
from edge.crew.place import private_folder, reserved, shared
from edge.crew.seat import Seat
from edge.crew.watch import PATIENCE, Patience, hangs
from edge.workers.keeper import hosting

_log = logging.getLogger("skerry.crew")

CONFIG_EXIT = 2
"""A worker that refuses its configuration: starting it again cannot help."""
NEAR = "127.0.0.1:0"
"""Where the host of Workers comes in, in plaintext, when callers speak https."""
GRACE_S = 25.0
"""From SIGTERM to SIGKILL: a little more than a worker lets answers go on."""


def run_crew(world: World, name: str, *, pauses: Pauses = PAUSES, beside: bool = False) -> int:
    """Until SIGTERM, SIGINT or RETIRE. Returns the exit code. `beside`: another crew has the
    address still, and is to retire. Raises ConfigError."""
    log.setup(f"edge/{name}/0", form=world.topology.observe.log)
    edge = world.topology.edge(name)
    public_of(world, name)  # refused once here, not by every worker
    place = shared(edge.listen) if beside else reserved(edge.listen)
    hosts = edge.tls is not None and edge.admin is not None
    inner = reserved(NEAR) if hosts else nullcontext(None)
    with place as address, inner as near, private_folder() as folder, _lifeline() as lifeline:
        command = [
            *(sys.executable, "-m", "edge"),
            *("--topology", str(world.path), "--state", str(world.state), "--name", name),
            *("--address", address, "--folder", str(folder), "--lifeline", str(lifeline)),
            *(() if near is None else ("--plain-address", near)),
        ]
        crew = Crew(command, edge.workers, folder, lifeline, pauses)
        return asyncio.run(_with_host(crew, world, name, address, near or address))


async def _with_host(crew: Crew, world: World, name: str, address: str, near: str) -> int:
    async with hosting(world, name, address, near=near):
        return await crew.run()


class Crew:
    """`command` starts a worker once its number is added; its socket is in `folder`."""

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        folder: Path,
        lifeline: int,
        pauses: Pauses,
        patience: Patience = PATIENCE,
    ) -> None:
        self._command = command
        self._workers = workers
        self._folder = folder
        self._patience = patience
        self._lifeline = lifeline
        self._pauses = pauses
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._refused = self._retiring = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for asked in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(asked, self.stop)
        loop.add_signal_handler(RETIRE, self.retire)
        async with asyncio.TaskGroup() as group:
            numbers = range(1, self._workers + 1)
            keepers = [group.create_task(self._keep(number)) for number in numbers]
            await self._stopping.wait()
            if self._retiring:
                await asyncio.wait(keepers)  # until the last answer, or until it is told to stop
            await asyncio.wait(keepers, timeout=GRACE_S)
            for number, process in self._processes.items():
                _log.warning("worker does not end worker=%d", number)
                process.kill()
        _log.info("edge stopped")
        return CONFIG_EXIT if self._refused else 0

    async def _keep(self, worker: int) -> None:
        pause_s = 0.0
        while not self._stopping.is_set():
            started = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--worker", str(worker)),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(self._lifeline,),
            )
            self._processes[worker] = process
            if self._stopping.is_set():
                process.send_signal(signal.SIGTERM)
            code = await self._end(worker, process)
            del self._processes[worker]
            if self._stopping.is_set():
                return
            if code == CONFIG_EXIT:
                _log.error("worker refused to start worker=%d", worker)
                self._refused = True
                self.stop()
                return
            pause_s = self._pauses.after(pause_s, time.monotonic() - started)
            _log.warning("worker ended worker=%d code=%d again_s=%.1f", worker, code, pause_s)
            await self._rest(pause_s)

    async def _end(self, worker: int, process: asyncio.subprocess.Process) -> int:
        """The exit code of a worker, which is made to end when it hangs. Not while it is stopping:
        that has a limit of its own."""
        where = Seat(number=worker, of=self._workers, folder=self._folder).socket(worker)
        ended = asyncio.create_task(process.wait())
        watch = asyncio.create_task(hangs(where, self._patience, time.monotonic))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({ended, watch, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and not (ended.done() or stopping.done()):
                silent_s = watch.result()
                _log.error("worker hangs, killing it worker=%d silent_s=%.1f", worker, silent_s)
                process.kill()
            return await ended
        finally:
            for task in (ended, watch, stopping):
                task.cancel()

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    def stop(self) -> None:
        """Asked twice, workers are asked twice: they end at once."""
        self._stopping.set()
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)

    def retire(self) -> None:
        """Another crew has the address now: workers end with their last answers."""
        self._retiring = True
        self._stopping.set()
        for process in self._processes.values():
            process.send_signal(RETIRE)


@contextmanager
def _lifeline() -> Iterator[int]:
    """The read end of a pipe whose write end only this process holds."""
    ours, held = os.pipe()
    try:
        yield ours
    finally:
        os.close(ours)
        os.close(held)
