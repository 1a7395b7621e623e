"""Kernels against what the machine can do, run by hand: `python -m kernels.bench`.

Prints, for reference and native code: decode attention in GB/s of KV read beside the rate of a
plain copy, and products with a weight in GB/s of weight read, for the sizes of a small model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch

from kernels.linear import Dense
from kernels.ops import Ops, TorchOps, select
from kernels.paged_attention import PagedRows

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 9, 3, 64, 16, 30


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    contestants = {"reference": TorchOps(), "chosen": select("cpu", threads=options.threads)}
    source = torch.ones(1 << 26, dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = best(lambda: target.copy_(source))
    say(f"copy of 64 MiB: {source.nbytes / seconds / 1e9:.1f} GB/s read")
    with torch.inference_mode():
        for context in (128, 1500, 6000):
            for name, ops in contestants.items():
                attention(name, ops, context)
        for out, columns in ((960, 576), (3072, 576), (576, 1536), (49152, 576)):
            for rows in (1, 8, 32):
                for name, ops in contestants.items():
                    product(name, ops, out, columns, rows)
    return 0


def attention(name: str, ops: Ops, context: int) -> None:
    """One token of one sequence, through all layers of a pool that does not fit the cache."""
    blocks = -(-context // BLOCK)
    pool = torch.randn(blocks, LAYERS, 2, KV_HEADS, BLOCK, DIM).to(torch.bfloat16)
    kv = pool.unbind(1)
    rows = PagedRows(
        starts=(context - 1,),
        lengths=(1,),
        decode=1,
        tables=torch.randperm(blocks, dtype=torch.int32)[None],
        slots=torch.tensor([context - 1]),
        spans=torch.tensor([[0, 1, context - 1]], dtype=torch.int32),
    )
    qkv = torch.randn(1, HEADS + 2 * KV_HEADS, DIM).to(torch.bfloat16)
    cos, sin = torch.ones(1, DIM // 2), torch.zeros(1, DIM // 2)

    def step() -> None:
        for layer in kv:
            ops.attention(qkv, layer, rows, cos, sin, 0.125)

    seconds = best(step)
    say(
        f"attention {name:9} context {context:5}: {seconds / LAYERS * 1e6:7.0f} µs a layer, "
        f"{pool.nbytes / seconds / 1e9:5.1f} GB/s"
    )


def product(name: str, ops: Ops, out: int, columns: int, rows: int) -> None:
    copies = max(2, (40 << 20) // (out * columns))  # more than the cache holds
    layers = []
    for _ in range(copies):
        dense = Dense(torch.randn(out, columns).to(torch.bfloat16))
        stored = torch.full((out, columns // 32 * 20), 17, dtype=torch.uint8)
        layers.append(ops.quantised(dense, "Q4_1", stored))
    x = torch.randn(rows, columns).to(torch.bfloat16)

    def step() -> None:
        for layer in layers:
            layer(x)

    seconds = best(step) / copies
    say(
        f"product   {name:9} {out:5}×{columns:4} rows {rows:2}: {seconds * 1e6:7.0f} µs, "
        f"{out * columns * 20 / 32 / seconds / 1e9:5.1f} GB/s of 4-bit, "
        f"{2 * rows * out * columns / seconds / 1e9:6.0f} GFLOP/s"
    )


def best(step: Callable[[], object], seconds: float = 0.3) -> float:
    step()
    found = float("inf")
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        step()
        found = min(found, time.perf_counter() - began)
    return found


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
