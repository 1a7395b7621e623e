"""The rank processes that `drive` drives: started as a node front starts them, one or several."""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from core.engine.environment import thread_environment
from core.engine.messages import (
    Command,
    LoadFailed,
    Loading,
    RankConfig,
    RankMessage,
    Ready,
    Shutdown,
    rank_message_decoder,
)
from core.errors import ConfigError, InternalError
from core.framing import encode_frame

_READ_BYTES = 1 << 18
_STOP_S = 10


@dataclass(frozen=True, slots=True)
class Loaded:
    """`weights_s`: from the first rank that began to read weights to the last that had."""

    ready: Sequence[Ready]
    weights_s: float


class DrivenRank:
    """Owns the process and the front's end of its socket."""

    def __init__(self, config: RankConfig) -> None:
        self.socket, theirs = socket.socketpair()
        self._decoder = rank_message_decoder()
        config = msgspec.structs.replace(config, socket_fd=theirs.fileno())
        handed = [fd for fd in (theirs.fileno(), config.master_fd) if fd >= 0]
        self._process = subprocess.Popen(
            (sys.executable, "-m", "core.engine.rank"),
            pass_fds=handed,
            env=_environment(config),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, *commands: Command) -> None:
        if commands:
            self.socket.sendall(b"".join(encode_frame(command) for command in commands))

    def receive(self, pause: float | None, *, descriptors: bool = False) -> Iterator[RankMessage]:
        """What has come, after waiting for it at most `pause` seconds. Raises InternalError."""
        if not select.select([self.socket], [], [], pause)[0]:
            return
        if descriptors:
            data, given, _, _ = socket.recv_fds(self.socket, _READ_BYTES, 4)
            for descriptor in given:
                os.close(descriptor)  # the KV memory is the rank's own affair here
        else:
            data = self.socket.recv(_READ_BYTES)
        if not data:
            raise InternalError("the rank has gone")
        yield from self._decoder.feed(data)

    def ask_to_stop(self) -> None:
        with suppress(OSError):  # it may have gone already
            self.send(Shutdown())
        self.socket.close()

    def close(self) -> None:
        """The rank has ended when this returns."""
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start(config: RankConfig) -> list[DrivenRank]:
    """All ranks of `config.plan`, the leader first."""
    count = config.plan.ranks
    if count == 1:
        return [DrivenRank(config)]
    ranks: list[DrivenRank] = []
    secret = secrets.token_hex(16)
    with socket.create_server((config.master_addr, 0)) as meeting:
        for rank in range(count):
            one = msgspec.structs.replace(
                config,
                rank=rank,
                local_rank=rank,
                master_port=meeting.getsockname()[1],
                master_fd=-1 if rank else meeting.fileno(),
                master_secret=secret,
            )
            ranks.append(DrivenRank(one))
    return ranks


def wait_until_ready(ranks: Sequence[DrivenRank]) -> Loaded:
    """Raises ConfigError when one does not come up, InternalError when one goes."""
    ready: dict[int, Ready] = {}
    begun = ended = 0.0
    by_socket = {one.socket: number for number, one in enumerate(ranks)}
    while len(ready) < len(ranks):
        for sock in select.select(list(by_socket), [], [])[0]:
            number = by_socket[sock]
            for message in ranks[number].receive(0, descriptors=True):
                if isinstance(message, Ready):
                    ready[number] = message
                elif isinstance(message, LoadFailed):
                    raise ConfigError(message.message)
                elif isinstance(message, Loading) and message.stage == "weights":
                    begun = begun or time.perf_counter()
                    ended = time.perf_counter()
    return Loaded([ready[number] for number in sorted(ready)], ended - begun)


def stop(ranks: Sequence[DrivenRank]) -> None:
    for rank in ranks:
        rank.ask_to_stop()
    for rank in ranks:
        rank.close()


def _environment(config: RankConfig) -> Mapping[str, str]:
    """As a node front sets it."""
    return {
        **os.environ,
        "SKERRY_RANK": msgspec.json.encode(config).decode(),
        **thread_environment(config.threads),
    }
