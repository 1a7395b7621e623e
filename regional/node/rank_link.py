"""One rank process: start it, talk to it over a socket pair, and know when it has died or hangs.

Frames of `core.engine.messages` both ways. The descriptor of the KV memory comes with the Ready
frame. The pair is also the leash: a rank whose front is gone reads the end of the stream and exits.
A rank always has something to say, if only a Pulse: one that is silent for too long is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from core.engine.environment import thread_environment
from core.engine.messages import (
    Command,
    LoadFailed,
    Loading,
    Pulse,
    RankConfig,
    RankMessage,
    Ready,
    Shutdown,
    rank_message_decoder,
)
from core.errors import ConfigError, NodeLost, RequestError
from core.framing import encode_frame
from core.kv.memory import attach
from core.naps import nap

log = logging.getLogger("skerry.node")

RANK_COMMAND = (sys.executable, "-m", "core.engine.rank")
_READ_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a rank may say nothing at all; `look_s` is how often that is looked at. While it
    loads it speaks at each hundredth of its weights, which may come from a slow disk. One that has
    closed its socket, or was told to stop, gets `exit_s` before it is killed."""

    loading_s: float = 300.0
    serving_s: float = 10.0
    look_s: float = 1.0
    exit_s: float = 2.0


PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank that serves, and the KV memory that it shares. `descriptor`: of that memory, open as
    long as the link."""

    ready: Ready
    memory: mmap.mmap
    descriptor: int


class RankLink:
    """A running rank. Made by `start`; `close` ends the process whatever it does. `status`: how it
    exited, once it is lost."""

    def __init__(
        self,
        config: RankConfig,
        process: asyncio.subprocess.Process,
        sock: socket.socket,
        patience: Patience,
    ) -> None:
        self._title = f"rank {config.rank} of node {config.node} (pid {process.pid})"
        self.status: int | None = None
        self._process = process
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._decoder = rank_message_decoder()
        self._receive: Callable[[RankMessage], None] | None = None
        self._early: list[RankMessage] = []
        self._descriptor: int | None = None
        self._unsent = bytearray()
        self._open = True
        self._last_words = ""
        self._stage = ""
        self._patience = patience
        self._heard_at = self._loop.time()
        self._crime = ""
        self._loaded: asyncio.Future[Loaded] = self._loop.create_future()
        self._lost: asyncio.Future[NodeLost] = self._loop.create_future()
        self._hung_up = asyncio.Event()
        self._relay = asyncio.create_task(self._relay_stderr(), name="rank-stderr")
        self._watch = asyncio.create_task(self._wait_for_end(), name="rank-watch")
        self._listening = asyncio.create_task(self._listen(), name="rank-listen")
        self._loop.add_reader(sock, self._readable)

    @classmethod
    async def start(
        cls,
        config: RankConfig,
        *,
        command: Sequence[str] = RANK_COMMAND,
        environment: Mapping[str, str] | None = None,
        patience: Patience = PATIENCE,
    ) -> RankLink:
        """Start the process; `config.socket_fd` is replaced by the real one, and `master_fd` is
        handed on."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        config = msgspec.structs.replace(config, socket_fd=theirs.fileno())
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[fd for fd in (theirs.fileno(), config.master_fd) if fd >= 0],
                env=rank_environment(config, environment or os.environ),
                start_new_session=True,  # Ctrl-C in a terminal is for the front to hand on
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(config, process, ours, patience)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> Loaded:
        """Wait until the rank serves. Raises ConfigError when it cannot load what it was told to,
        NodeLost when it dies."""
        either: list[asyncio.Future[Any]] = [self._loaded, self._lost]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._loaded.done():
            raise self._lost.result()
        return self._loaded.result()

    def attach(self, receive: Callable[[RankMessage], None]) -> None:
        """Hand messages that come after Ready to `receive`."""
        self._receive = receive
        early, self._early = self._early, []
        for message in early:
            receive(message)

    def send(self, command: Command) -> None:
        """Queue a command; dropped when the rank is gone, of which `lost` tells."""
        if not self._open:
            return
        waiting = bool(self._unsent)
        self._unsent += encode_frame(command)
        if not waiting:
            self._writable()

    async def lost(self) -> NodeLost:
        """Wait for the end of the process; the error says who ended and how, in one line."""
        return await asyncio.shield(self._lost)

    def kill(self) -> None:
        """End the process now."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Ask the rank to stop, then make it. Returns when the process is gone."""
        self.send(Shutdown())
        await asyncio.wait([self._watch], timeout=self._patience.exit_s)
        self._hang_up()
        await self._watch

    def _readable(self) -> None:
        try:
            if self._descriptor is None and not self._loaded.done():
                data, descriptors, _, _ = socket.recv_fds(self._sock, _READ_BYTES, 1)
                self._descriptor = descriptors[0] if descriptors else None
            else:
                data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up()
            return
        self._heard_at = self._loop.time()
        try:
            for message in self._decoder.feed(data):
                self._take(message)
        except RequestError as error:
            log.error("%s: %s", self._title, error)
            self._hang_up()
        except Exception:
            # What else was lost is not known: a lost node is better than answers that hang.
            log.exception("%s: a fault of ours on hearing it", self._title)
            self._hang_up()

    def _take(self, message: RankMessage) -> None:
        if isinstance(message, Loading):
            if message.stage != self._stage:
                log.info("%s is loading: %s", self._title, message.stage)
            self._stage = message.stage
        elif isinstance(message, Ready):
            self._map(message)
        elif isinstance(message, LoadFailed):
            if not self._loaded.done():
                self._loaded.set_exception(ConfigError(message.message))
        elif isinstance(message, Pulse):
            return
        elif self._receive is None:
            self._early.append(message)
        else:
            self._receive(message)

    def _map(self, ready: Ready) -> None:
        if self._descriptor is None or self._loaded.done():
            raise NodeLost("Ready came twice, or without the KV memory")
        try:
            memory = attach(self._descriptor, ready.geometry.pool_bytes)
        except (OSError, ValueError) as error:
            raise NodeLost(f"its KV memory cannot be mapped: {error}") from error
        self._loaded.set_result(Loaded(ready, memory, self._descriptor))

    def _writable(self) -> None:
        self._loop.remove_writer(self._sock)
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._writable)
        except OSError:
            self._hang_up()

    def _hang_up(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._hung_up.set()

    async def _wait_for_end(self) -> None:
        """Runs until the process has ended, and makes sure that it does after a hang-up."""
        process_end = asyncio.create_task(self._process.wait())
        hung_up = asyncio.create_task(self._hung_up.wait())
        try:
            await asyncio.wait({process_end, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({process_end}, timeout=self._patience.exit_s)
            if not process_end.done():
                self.kill()
            status = self.status = await process_end
        finally:
            hung_up.cancel()
        await asyncio.wait([self._relay], timeout=self._patience.exit_s)
        self._relay.cancel()
        self._listening.cancel()
        self._hang_up()
        words = f"; its last words: {self._last_words}" if self._last_words else ""
        self._lost.set_result(NodeLost(f"{self._title} {self._crime or _how(status)}{words}"))

    async def _listen(self) -> None:
        """Kill the rank when it hangs: nothing else ends one that is stopped or in a deadlock."""
        while True:
            awake = await nap(self._patience.look_s)
            now = self._loop.time()
            if not awake:  # as it may have been, if both were stopped: both begin anew
                self._heard_at = now
            serving = self._loaded.done()
            limit_s = self._patience.serving_s if serving else self._patience.loading_s
            if now - self._heard_at > limit_s:
                self._crime = f"was silent for {limit_s:g} s and is killed"
                self.kill()
                return

    async def _relay_stderr(self) -> None:
        """Pass the rank's lines on, and keep the last one for its obituary."""
        stream = self._process.stderr
        while stream is not None:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the reader's limit: dropped, reading goes on
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text:
                self._last_words = text
                sys.stderr.write(text + "\n")


def rank_environment(config: RankConfig, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank."""
    several = {
        "MASTER_ADDR": config.master_addr,
        "MASTER_PORT": str(config.master_port),
        "RANK": str(config.rank),
        "WORLD_SIZE": str(config.plan.ranks),
    }
    return {
        **base,
        **(several if config.plan.ranks > 1 else {}),
        "SKERRY_RANK": msgspec.json.encode(config).decode(),
        **thread_environment(config.threads),
        "PYTHONUNBUFFERED": "1",
    }


def _how(status: int) -> str:
    if status >= 0:
        return f"exited with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
