"""A contestant's process: JSON lines both ways, bounded times, stopped while others have a turn."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from loadtest.bench.workload import Request

_READ_BYTES = 1 << 18
_LAST_LINES = 3
_T = TypeVar("_T")


class ContestantFailed(Exception):
    """It did not come up, did not answer in time, or answered that it cannot. The message is for a
    person; the contestant is of no more use."""


class _Error(msgspec.Struct):
    error: str | None = None


class _Times(msgspec.Struct):
    times: list[list[float]]


class _Ids(msgspec.Struct):
    ids: tuple[int, ...]


class Resident(msgspec.Struct, frozen=True):
    """Bytes; `pool` is the part that is KV memory."""

    rss: int
    pool: int


class Drafts(msgspec.Struct, frozen=True):
    """Of an engine's counters, those about guesses."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Shared(msgspec.Struct, frozen=True):
    """Of an engine's counters, those about ranks that compute together, since they began."""

    sent_bytes: int
    least_bytes: int
    stage_seconds: tuple[float, ...]
    pipeline_bubble: float


class Started(msgspec.Struct, frozen=True):
    """The first line of a worker. `pids` are those of its ranks, `weights_s` what reading the
    weights took them."""

    ready_s: float
    pid: int
    vocab_size: int
    kv_bytes_per_token: int = 0
    pids: tuple[int, ...] = ()
    weights_s: float = 0.0


class Worker:
    """Owns a process group of its own. What it writes to stderr goes to `log`.

    `end_s`: what it has for ending by itself. Everything raises ContestantFailed; the process is
    gone then.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        start_s: float,
        end_s: float = 5.0,
    ) -> None:
        self._log = log
        self._end_s = end_s
        self._buffer = bytearray()
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                env=dict(env), cwd=cwd, start_new_session=True,
            )  # fmt: skip
        self.started = self._take(Started, start_s)

    def play(self, requests: Sequence[Request], limit_s: float) -> list[list[float]]:
        """Times of the tokens of each request."""
        return self._ask({"op": "play", "requests": requests}, _Times, limit_s).times

    def encode(self, text: str, limit_s: float = 60.0) -> tuple[int, ...]:
        return self._ask({"op": "encode", "text": text}, _Ids, limit_s).ids

    def memory(self, limit_s: float = 30.0) -> Resident:
        return self._ask({"op": "memory"}, Resident, limit_s)

    def drafts(self, limit_s: float = 30.0) -> Drafts:
        return self._ask({"op": "stats"}, Drafts, limit_s)

    def shared(self, limit_s: float = 30.0) -> Shared:
        return self._ask({"op": "stats"}, Shared, limit_s)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Runs only inside; a new worker runs until it has been in one."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.rest()

    def rest(self) -> None:
        """Stand still until the next turn: threads that spin would slow the others down."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """The process and its children are gone when this returns."""
        self._signal(signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._end_s)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ask(self, order: object, kind: type[_T], limit_s: float) -> _T:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed("has gone") from error
        return self._take(kind, limit_s)

    def _take(self, kind: type[_T], limit_s: float) -> _T:
        line = self._line(limit_s)
        try:
            problem = msgspec.json.decode(line, type=_Error).error
            if problem is None:
                return msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError as error:
            problem = f"said something else than expected: {error}"
        raise self._failed(problem)

    def _line(self, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        until = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise self._failed(f"gave no answer in {limit_s:.0f} s")
            data = os.read(descriptor, _READ_BYTES)
            if not data:
                raise self._failed("has gone")
            self._buffer += data
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line

    def _failed(self, why: str) -> ContestantFailed:
        """What to raise, once the process is gone."""
        self._signal(signal.SIGKILL)
        self.close()
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = " | ".join(lines[-_LAST_LINES:])
        return ContestantFailed(f"{why}; its log {self._log} ends: {said}" if said else why)
