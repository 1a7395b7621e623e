"""Rates of the runner on this machine, run by hand: `python -m core.engine.bench MODEL`.

Prints tokens per second of prefill (prompts of 512 and 1500 in chunks) and of decode (batches of
1, 8 and 32 at contexts of 128 and 1500), each the best of a few runs, for one thread count.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence

from core.engine.messages import RankConfig
from core.engine.plan import Row, SampleSpec, SequenceId, StepPlan
from core.engine.runner_torch import TorchRunner
from core.types import BLOCK_TOKENS

_GREEDY = SampleSpec(temperature=0, top_p=1, top_k=0, seed=0, choice=0, position=0)
_LONGEST = 1600


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file or a folder of safetensors")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--native", choices=("on", "off"), default="on")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each figure")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args(arguments)
    blocks = max(options.batches) * _LONGEST // BLOCK_TOKENS
    config = RankConfig(
        node="bench",
        socket_fd=-1,
        source=options.model,
        kv_blocks=blocks,
        threads=options.threads,
        dtype=options.dtype,
    )
    runner = TorchRunner(config, native=options.native == "on")
    began = time.perf_counter()
    runner.load(lambda stage, fraction: None)
    _say(f"load {time.perf_counter() - began:.2f} s, threads {options.threads}")
    for length in (512, 1500):
        best = min(_prefill(runner, length) for _ in range(2))
        _say(f"prefill {length:5d}            {length / best:8.1f} tok/s")
    for context in (128, 1500):
        for size in options.batches:
            best = _decode(runner, size, context, options.seconds)
            _say(f"decode  batch {size:2d} at {context:5d} {size / best:8.1f} tok/s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    _say(f"peak resident {peak:.0f} MiB")
    runner.close()
    return 0


def _prefill(runner: TorchRunner, length: int, chunk: int = 512) -> float:
    table = tuple(range(-(-length // BLOCK_TOKENS)))
    total = 0.0
    for start in range(0, length, chunk):
        size = min(chunk, length - start)
        ids = tuple((start + n) % 5000 for n in range(size))
        row = Row(SequenceId("p"), ids, start, (table,), None)
        total += runner.submit(StepPlan(0, (row,))).result().seconds
    return total


def _decode(runner: TorchRunner, size: int, context: int, seconds: float) -> float:
    each = _LONGEST // BLOCK_TOKENS
    tables = [tuple(range(n * each, (n + 1) * each)) for n in range(size)]
    best = float("inf")
    until = 0.0
    while not until or time.perf_counter() < until:
        rows = [
            Row(SequenceId(str(n)), (n + 100,), context, (table,), _GREEDY)
            for n, table in enumerate(tables)
        ]
        taken = runner.submit(StepPlan(0, tuple(rows))).result().seconds
        if not until:  # the first step touches the memory of the pool
            until = time.perf_counter() + seconds
        else:
            best = min(best, taken)
    return best


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
