"""A rank process and its front's end of the socket pair."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from core.engine.messages import Command, RankConfig, RankMessage, Stepped, rank_message_decoder
from core.framing import encode_frame
from core.types import FinishReason

PATIENCE_S = 30.0


@dataclass
class RankProcess:
    process: subprocess.Popen[bytes]
    sock: socket.socket
    descriptors: list[int] = field(default_factory=list)
    heard: list[RankMessage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._decoder = rank_message_decoder()

    def say(self, *commands: Command) -> None:
        for command in commands:
            self.sock.sendall(encode_frame(command))

    def listen(self) -> bool:
        """Take what comes next; False at the end of the stream."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 16, 1)
        except ConnectionResetError:
            return False
        self.descriptors.extend(descriptors)
        self.heard.extend(self._decoder.feed(data))
        return bool(data)

    def tokens(self, sequence: str) -> tuple[list[int], FinishReason | None]:
        outputs = [
            output
            for message in self.heard
            if isinstance(message, Stepped)
            for output in message.outputs
            if output.sequence == sequence
        ]
        return [t for o in outputs for t in o.token_ids], outputs[-1].finish if outputs else None

    def until_finished(self, sequence: str) -> list[int]:
        while self.tokens(sequence)[1] is None:
            assert self.listen(), "the rank went away"
        return self.tokens(sequence)[0]

    def until(self, kind: type) -> RankMessage:
        while True:
            for message in self.heard:
                if isinstance(message, kind):
                    self.heard.remove(message)
                    return message
            assert self.listen(), f"the rank went away before {kind.__name__}"

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)


@contextmanager
def rank_process(config: RankConfig, module: str = "core.engine.rank") -> Iterator[RankProcess]:
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE_S)
    config = msgspec.structs.replace(config, socket_fd=theirs.fileno())
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        env={
            **os.environ,
            "SKERRY_RANK": msgspec.json.encode(config).decode(),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        },
        pass_fds=[theirs.fileno(), *([config.master_fd] if config.master_fd >= 0 else [])],
        stderr=subprocess.PIPE,
    )
    theirs.close()
    rank = RankProcess(process, ours)
    try:
        yield rank
    finally:
        ours.close()
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE_S)
        if process.stderr is not None:
            process.stderr.close()
        for descriptor in rank.descriptors:
            os.close(descriptor)


def complaint(rank: RankProcess) -> str:
    assert rank.process.stderr is not None
    return rank.process.stderr.read().decode()
