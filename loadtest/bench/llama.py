"""llama.cpp through its own measuring tools, a process for each figure."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from loadtest.bench.workers import ContestantFailed
from loadtest.bench.workload import DECODED, PREFILL, PROMPT


class _Batched(msgspec.Struct):
    speed_tg: float


class _Bench(msgspec.Struct):
    avg_ts: float


_T = TypeVar("_T")


class Llama:
    """Raises ContestantFailed."""

    name = "llama.cpp"

    def __init__(self, tools: Path, model: Path, *, threads: int, env: Mapping[str, str]) -> None:
        self._tools = tools
        self._model = model
        self._threads = str(threads)
        self._env = dict(env)

    def decode(self, size: int, limit_s: float) -> float:
        """Tokens a second of `size` sequences, after prompts of their own."""
        context = size * (PROMPT + DECODED)
        out = self._run(
            limit_s, "llama-batched-bench", "-c", str(context), "-b", "2048", "-ub", "512",
            "-npp", str(PROMPT), "-ntg", str(DECODED), "-npl", str(size),
            "-t", self._threads, "-tb", self._threads, "--output-format", "jsonl",
        )  # fmt: skip
        return speed(out, _Batched).speed_tg

    def prefill(self, limit_s: float) -> float:
        out = self._run(
            limit_s, "llama-bench", "-p", str(PREFILL), "-n", "0", "-r", "1",
            "-t", self._threads, "-o", "jsonl",
        )  # fmt: skip
        return speed(out, _Bench).avg_ts

    def start(self, limit_s: float) -> float:
        """Seconds from the start of the process to its end after one token."""
        began = time.perf_counter()
        self._run(
            limit_s, "llama-completion", "-p", "The capital of France is", "-n", "1",
            "-no-cnv", "--no-warmup", "-t", self._threads,
        )  # fmt: skip
        return time.perf_counter() - began

    def _run(self, limit_s: float, tool: str, *options: str) -> str:
        command = [str(self._tools / tool), "-m", str(self._model), *options]
        try:
            done = subprocess.run(
                command, env=self._env, timeout=limit_s, check=True, capture_output=True,
                stdin=subprocess.DEVNULL, text=True, errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ContestantFailed(f"{tool} gave no answer in {limit_s:.0f} s") from None
        except (OSError, subprocess.CalledProcessError) as error:
            lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
            raise ContestantFailed(f"{tool} failed: {lines[-1] if lines else error}") from error
        return done.stdout


def speed(out: str, kind: type[_T]) -> _T:
    """From the last line of `out` that is of `kind`. Raises ContestantFailed."""
    for line in reversed(out.splitlines()):
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError:
            continue  # blank lines and remarks
    raise ContestantFailed("llama.cpp's tool printed no figures")
