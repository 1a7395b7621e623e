"""`python -m core.engine.drive MODEL`: a rank driven as a node front drives it, for measurements.

Starts one rank process and speaks JSON, a line each way, on stdin and stdout; torch stays in the
rank. The first line out says that the rank is ready. Then, for each line in, one line out:

    {"op": "play", "requests": [{"at": 0.5, "prompt": [ids], "tokens": 64}, …]}
        → {"times": [[seconds of each token], …]}   both counted from the start of the play
    {"op": "encode", "text": "…"} → {"ids": […]}
    {"op": "memory"} → {"rss": bytes, "pool": bytes of it that are KV memory}
    {"op": "stats"} → {…}                           the rank's last gauges and counters

Answers are greedy and go on to their last token. Ends with its stdin, and the rank with it.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from core.engine.messages import (
    Abort,
    Command,
    EngineStats,
    LoadFailed,
    RankConfig,
    RankMessage,
    Ready,
    Run,
    SequenceFailed,
    SequenceSpec,
    Shutdown,
    Stepped,
    rank_message_decoder,
)
from core.engine.plan import SequenceId
from core.errors import ConfigError, InternalError
from core.framing import encode_frame
from core.text.model import TextModel, load_text
from core.types import BLOCK_TOKENS

_READ_BYTES = 1 << 18
_STOP_S = 10


class Arrival(msgspec.Struct, frozen=True):
    """`at`: seconds after the start of the play."""

    at: float
    prompt: tuple[int, ...]
    tokens: int


class Play(msgspec.Struct, frozen=True, tag="play", tag_field="op"):
    requests: tuple[Arrival, ...]


class Encode(msgspec.Struct, frozen=True, tag="encode", tag_field="op"):
    text: str


class Memory(msgspec.Struct, frozen=True, tag="memory", tag_field="op"):
    pass


class Stats(msgspec.Struct, frozen=True, tag="stats", tag_field="op"):
    pass


Order = Play | Encode | Memory | Stats


class Driver:
    """Owns the rank process and the socket to it. `ready` is what the rank said when it came up.

    Raises ConfigError when the rank does not come up, InternalError when it goes or refuses.
    """

    def __init__(self, config: RankConfig) -> None:
        self._socket, theirs = socket.socketpair()
        self._decoder = rank_message_decoder()
        self._stats: EngineStats | None = None
        self._plays = 0
        self._source = Path(config.source)
        self._text: TextModel | None = None
        config = msgspec.structs.replace(config, socket_fd=theirs.fileno())
        self._process = subprocess.Popen(
            (sys.executable, "-m", "core.engine.rank"),
            pass_fds=(theirs.fileno(),),
            env=_environment(config),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        try:
            self.ready = self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def play(self, requests: Sequence[Arrival]) -> list[list[float]]:
        """Times of each request's tokens."""
        self._plays += 1
        names = [SequenceId(f"{self._plays}.{n}") for n in range(len(requests))]
        times: dict[SequenceId, list[float]] = {name: [] for name in names}
        coming = sorted(range(len(requests)), key=lambda n: requests[n].at, reverse=True)
        running: set[SequenceId] = set()
        began = time.perf_counter()
        try:
            while coming or running:
                now = time.perf_counter() - began
                due: list[Command] = []
                while coming and requests[coming[-1]].at <= now:
                    index = coming.pop()
                    running.add(names[index])
                    due.append(Run(names[index], _greedy(requests[index])))
                self._send(*due)
                pause = requests[coming[-1]].at - now if coming else None
                for message in self._receive(pause):
                    running -= _note(message, times, time.perf_counter() - began)
                    if isinstance(message, Stepped):
                        self._stats = message.stats
        except BaseException:
            with suppress(OSError):  # a rank that has gone has nothing left to abort
                self._send(*(Abort(name) for name in running))
            raise
        return [times[name] for name in names]

    def encode(self, text: str) -> list[int]:
        if self._text is None:
            self._text = load_text(self._source)
        return self._text.encode_prompt(text)

    def memory(self) -> dict[str, int]:
        return resident(Path(f"/proc/{self.pid}/smaps").read_text(encoding="utf-8"))

    def stats(self) -> EngineStats | None:
        return self._stats

    def close(self) -> None:
        """The rank has ended when this returns."""
        with suppress(OSError):  # it may have gone already
            self._send(Shutdown())
        self._socket.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self) -> Ready:
        while True:
            for message in self._receive(None, descriptors=True):
                if isinstance(message, Ready):
                    return message
                if isinstance(message, LoadFailed):
                    raise ConfigError(message.message)

    def _send(self, *commands: Command) -> None:
        if commands:
            self._socket.sendall(b"".join(encode_frame(command) for command in commands))

    def _receive(self, pause: float | None, *, descriptors: bool = False) -> Iterator[RankMessage]:
        """What has come, after waiting for it at most `pause` seconds."""
        if not select.select([self._socket], [], [], pause)[0]:
            return
        if descriptors:
            data, given, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 4)
            for descriptor in given:
                os.close(descriptor)  # the KV memory is the rank's own affair here
        else:
            data = self._socket.recv(_READ_BYTES)
        if not data:
            raise InternalError("the rank has gone")
        yield from self._decoder.feed(data)


def _note(
    message: RankMessage, times: dict[SequenceId, list[float]], now: float
) -> set[SequenceId]:
    """Write down what `message` brought; the sequences that ended with it."""
    if isinstance(message, SequenceFailed) and message.sequence in times:
        raise InternalError(f"the rank refused a sequence: {message.message}")
    if not isinstance(message, Stepped):
        return set()
    ended = set()
    for output in message.outputs:
        if output.sequence in times:
            times[output.sequence] += [now] * len(output.token_ids)
            if output.finish is not None:
                ended.add(output.sequence)
    return ended


def _greedy(arrival: Arrival) -> SequenceSpec:
    return SequenceSpec(token_ids=arrival.prompt, max_tokens=arrival.tokens, temperature=0.0)


def _environment(config: RankConfig) -> dict[str, str]:
    """As a node front sets it."""
    threads = str(config.threads)
    return {
        **os.environ,
        "SKERRY_RANK": msgspec.json.encode(config).decode(),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
    }


def resident(smaps: str) -> dict[str, int]:
    """Resident bytes out of /proc/PID/smaps, and those among them of anonymous shared memory."""
    total = pool = 0
    in_pool = False
    for line in smaps.splitlines():
        head, _, rest = line.partition(":")
        if " " in head:  # the first line of a mapping: addresses, rights, …, name
            in_pool = "/memfd:" in line
        elif head == "Rss":
            size = int(rest.split()[0]) * 1024
            total += size
            pool += size if in_pool else 0
    return {"rss": total, "pool": pool}


def answer(driver: Driver, order: Order) -> object:
    match order:
        case Play(requests):
            return {"times": driver.play(requests)}
        case Encode(text):
            return {"ids": driver.encode(text)}
        case Memory():
            return driver.memory()
        case Stats():
            return driver.stats()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file or a folder of safetensors")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--native", choices=("on", "off"), default="on")
    parser.add_argument("--speculation", choices=("on", "off"), default="on")
    parser.add_argument("--kv-tokens", type=int, default=65536)
    parser.add_argument("--step-tokens", type=int, default=512)
    options = parser.parse_args(arguments)
    config = RankConfig(
        node="drive",
        socket_fd=-1,
        engine=options.engine,
        source=options.model,
        dtype=options.dtype,
        threads=options.threads,
        kv_blocks=-(-options.kv_tokens // BLOCK_TOKENS),
        max_step_tokens=options.step_tokens,
        native=options.native == "on",
        speculate=options.speculation == "on",
    )
    decode = msgspec.json.Decoder(Order).decode
    began = time.perf_counter()
    try:
        driver = Driver(config)
        try:
            _say({
                "ready_s": time.perf_counter() - began,
                "pid": driver.pid,
                "vocab_size": driver.ready.vocab_size,
                "kv_bytes_per_token": driver.ready.geometry.bytes_per_token,
            })  # fmt: skip
            for line in sys.stdin.buffer:
                _say(answer(driver, decode(line)))
        finally:
            driver.close()
    except (ConfigError, InternalError, msgspec.MsgspecError) as error:
        _say({"error": str(error)})
        return 1
    return 0


def _say(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    raise SystemExit(main())
