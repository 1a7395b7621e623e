"""`python -m deploy.ssh.holder --topology FILE --state FOLDER --name NAME`: what systemd keeps for
an edge on its machine.

It holds the edge's listening socket and runs the edge as its child, started again when it ends.
Asked by `deploy.ssh.take_over` it starts another one beside it on the same socket, of whatever
release that one brings, and lets the first end with its last answer once the other is kept. It
carries no traffic and lives through releases, so it reads nothing but its own command line and what
it is asked.

A request is a connection to `NAME.holder` in the state folder, with lines of JSON:
`{"command": […]}` is answered by `{"pid": …, "at": "127.0.0.1:PORT"}` (`at`: where the new process
alone answers, "" for a crew), then `{"keep": true}` by `{"kept": true}`. When the new process ends
before that, `{"ended": CODE}` is said; a connection that ends without `keep` ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from core import log
from core.address import split_address
from core.config import load
from core.errors import ConfigError
from core.orders import RETIRE
from core.pauses import PAUSES, Pauses

_log = logging.getLogger("skerry.holder")

CONFIG_EXIT = 2
"""An edge that refuses its configuration: starting it again cannot help."""
BACKLOG = 2048
ASK_S = 10.0
"""From a connection to its request."""


def control_of(name: str) -> str:
    """In the state folder, and short: addresses of Unix sockets have a hundred bytes."""
    return f"{name}.holder"


def command_of(topology: Path, state: Path, name: str) -> list[str]:
    """How the edge is started by this release; its sockets come after it."""
    options = ("--topology", str(topology), "--state", str(state), "--name", name)
    return [sys.executable, "-m", "edge", *options]


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """A process of the edge."""

    process: asyncio.subprocess.Process
    command: Sequence[str]

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class Holder:
    """`listener` None: the edge is a crew, whose members bind the address themselves."""

    def __init__(self, listener: socket.socket | None, pauses: Pauses = PAUSES) -> None:
        self._listener = listener
        self._pauses = pauses
        self._stopping = asyncio.Event()
        self._current: Child | None = None
        self._children: set[Child] = set()
        self._callers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._busy = False

    async def run(self, command: Sequence[str], control: str) -> int:
        """Until SIGTERM or SIGINT, or until the edge refuses its configuration. The exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        _unlink(control)
        server = await asyncio.start_unix_server(self._answer, control)
        try:
            code = await self._keep(command)
        finally:
            server.close()
            _unlink(control)
        for writer in self._callers.values():
            writer.close()  # nobody takes over any more
        if self._callers:
            await asyncio.wait(self._callers)
        for child in self._children:
            await child.process.wait()
        return code

    def _stop(self) -> None:
        """Asked twice, the edge is asked twice: it ends at once."""
        self._stopping.set()
        for child in self._children:
            child.signal(signal.SIGTERM)

    async def _keep(self, command: Sequence[str]) -> int:
        """Whatever process has the place; started again when it ends."""
        child = self._current = await self._start(command)
        started, pause_s = time.monotonic(), 0.0
        while True:
            code = await child.process.wait()
            self._children.discard(child)
            if self._stopping.is_set():
                return 0
            if child is self._current:
                if code == CONFIG_EXIT:
                    return CONFIG_EXIT
                pause_s = self._pauses.after(pause_s, time.monotonic() - started)
                _log.warning("edge ended code=%d again_s=%.1f", code, pause_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stopping.wait()
                        return 0
            if child is self._current:  # and no other one has taken its place meanwhile
                self._current = None
                fresh = await self._start(child.command)
                self._current = self._current or fresh
                if self._current is not fresh:
                    fresh.signal(RETIRE)
            child, started = self._current, time.monotonic()

    async def _start(
        self, command: Sequence[str], own: socket.socket | None = None, *, beside: bool = False
    ) -> Child:
        words, sockets = [*command], []
        if self._listener is not None:
            words += ["--listen-fd", str(self._listener.fileno())]
            sockets.append(self._listener.fileno())
        elif beside:
            words.append("--beside")
        if own is not None:
            words += ["--plain-fd", str(own.fileno())]
            sockets.append(own.fileno())
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, pass_fds=sockets
        )
        child = Child(process, tuple(command))
        self._children.add(child)
        if self._stopping.is_set():
            child.signal(signal.SIGTERM)
        return child

    # ------------------------------------------------------------------ taking over

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "streams run it as one"
        self._callers[task] = writer
        try:
            if self._busy:
                await _say(writer, {"error": "another process is taking its place already"})
                return
            self._busy = True
            try:
                await self._take_over(reader, writer)
            finally:
                self._busy = False
        except (ConnectionError, TimeoutError, ValueError, LookupError, TypeError) as error:
            _log.warning("a request broke off kind=%s", type(error).__name__)
        finally:
            writer.close()
            del self._callers[task]

    async def _take_over(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(ASK_S):
            ask = json.loads(await reader.readline())
        command = [str(word) for word in ask["command"]]
        own = socket.create_server(("127.0.0.1", 0)) if self._listener is not None else None
        at = f"127.0.0.1:{own.getsockname()[1]}" if own is not None else ""
        try:
            child = await self._start(command, own, beside=True)
        except OSError as error:
            await _say(writer, {"error": f"{command[0]}: {error.strerror}"})
            return
        finally:
            if own is not None:
                own.close()
        kept = False
        try:
            await _say(writer, {"pid": child.process.pid, "at": at})
            kept = await self._is_kept(child, reader, writer)
        finally:
            if not kept:
                child.signal(signal.SIGTERM)
                await child.process.wait()
                self._children.discard(child)
        if kept:
            self._put(child)
            await _say(writer, {"kept": True})

    async def _is_kept(
        self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the other side says so before it leaves, and before the child ends."""
        said = asyncio.ensure_future(reader.readline())
        ended = asyncio.ensure_future(child.process.wait())
        try:
            await asyncio.wait({said, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await _say(writer, {"ended": ended.result()})
                return False
            line = said.result()
            return bool(line) and bool(json.loads(line)["keep"])
        finally:
            said.cancel()
            ended.cancel()

    def _put(self, child: Child) -> None:
        """In the place of the current one, which ends with its last answer."""
        first, self._current = self._current, child
        _log.info("edge taken over pid=%d", child.process.pid)
        if first is not None:
            first.signal(RETIRE)


def _unlink(path: str) -> None:
    """asyncio takes away what is left of an earlier socket only from Python 3.12 on."""
    with suppress(FileNotFoundError):
        os.unlink(path)


async def _say(writer: asyncio.StreamWriter, what: Mapping[str, object]) -> None:
    writer.write(json.dumps(what).encode() + b"\n")
    await writer.drain()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.ssh.holder", description=__doc__)
    parser.add_argument("--topology", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--name", required=True, help="the edge's name")
    options = parser.parse_args()
    try:
        return hold(options.topology.resolve(), options.state.resolve(), options.name)
    except ConfigError as error:
        sys.stderr.write(f"edge {options.name}: {error}\n")
        return CONFIG_EXIT


def hold(topology: Path, state: Path, name: str) -> int:
    """Be the holder of the edge `name`. Raises ConfigError."""
    described = load(topology, state=state).topology
    log.setup(f"holder/{name}", form=described.observe.log)
    edge = described.edge(name)
    listener = _listen(edge.listen) if edge.workers == 1 else None
    os.chdir(state)
    command = command_of(topology, state, name)
    return asyncio.run(Holder(listener).run(command, control_of(name)))


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"{address} cannot be listened on: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
