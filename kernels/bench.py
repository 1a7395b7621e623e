"""CPU kernels against what the machine can do, run by hand: `python -m kernels.bench`.

Prints the rates of memory and of the product instruction, then products with stored weights in
GFLOP/s and GB/s of weight, and attention in GB/s of KV read, for the sizes of a small model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.native import NativeOps
from kernels.ops import Ops, TorchOps, select
from kernels.paged_attention import PagedRows

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 9, 3, 64, 16, 30


@dataclass(frozen=True, slots=True)
class Blocks:
    """Stored weights of equal bytes."""

    encoding: str
    data: Tensor
    columns: int
    pairs: int = 0

    def decode(self, out: Tensor) -> None:
        out.fill_(0.5)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    chosen = select("cpu", torch.bfloat16, threads=options.threads)
    source = torch.ones(1 << 28, dtype=torch.uint8)
    seconds = best(lambda: source.view(torch.int64).sum())
    say(f"reading 256 MiB: {source.nbytes / seconds / 1e9:.1f} GB/s, {options.threads} threads")
    if isinstance(chosen, NativeOps):
        peak = chosen.library.skerry_peak() / 1e9
        say(f"product instruction, of 8-bit activations: {peak:.0f} GFLOP/s a core")
    with torch.inference_mode():
        sizes = ((960, 576, "Q4_1"), (3072, 576, "Q4_1"), (576, 1536, "Q4_1"), (49152, 576, "Q8_0"))
        for out, columns, encoding in sizes:
            for rows in (1, 8, 32, 128):
                for name, ops in (("reference", TorchOps(torch.bfloat16)), ("chosen", chosen)):
                    product(name, ops, out, columns, encoding, rows)
        if isinstance(chosen, NativeOps):
            for new, context in ((1, 128), (1, 1500), (1, 6000), (512, 1024)):
                attention(chosen, new, context)
    return 0


def attention(ops: NativeOps, new: int, context: int) -> None:
    """The last `new` tokens of one sequence, in a pool that does not fit the cache."""
    blocks = -(-context // BLOCK)
    pool = torch.randn(blocks, LAYERS, 2, KV_HEADS, BLOCK, DIM).to(torch.bfloat16)
    kv = pool.unbind(1)
    table = torch.randperm(blocks, dtype=torch.int32)[None]
    positions = torch.arange(context - new, context)
    rows = PagedRows(
        starts=(context - new,),
        lengths=(new,),
        decode=int(new == 1),
        tables=table,
        slots=table[0].long()[positions // BLOCK] * BLOCK + positions % BLOCK,
        spans=torch.tensor([[0, new, context - new]], dtype=torch.int32),
    )
    qkv = torch.randn(new, HEADS + 2 * KV_HEADS, DIM)
    frequencies = torch.ones(DIM // 2)

    def step() -> None:
        for layer in kv:
            ops.attention(qkv, layer, rows, positions, frequencies)

    seconds = best(step)
    seen = context - (new - 1) / 2
    say(
        f"attention {new:3} tokens at {context:5}: {seconds / LAYERS * 1e6:7.0f} µs a layer, "
        f"{pool.nbytes / seconds / 1e9:5.1f} GB/s of KV, "
        f"{4 * new * seen * HEADS * DIM * LAYERS / seconds / 1e9:5.0f} GFLOP/s"
    )


def product(name: str, ops: Ops, out: int, columns: int, encoding: str, rows: int) -> None:
    size = {"Q4_1": 20, "Q8_0": 34}[encoding]
    nbytes = out * columns * size // 32
    copies = max(2, (40 << 20) // nbytes)  # more than the cache holds
    stored = [torch.full((out, nbytes // out), 17, dtype=torch.uint8) for _ in range(copies)]
    layers = [ops.linear([Blocks(encoding, data, columns)], None) for data in stored]
    x = torch.randn(rows, columns)
    if isinstance(ops, TorchOps):
        x = x.to(torch.bfloat16)

    def step() -> None:
        for layer in layers:
            layer(x)

    seconds = best(step) / copies
    say(
        f"product   {name:9} {out:5}×{columns:4} rows {rows:3}: {seconds * 1e6:7.0f} µs, "
        f"{nbytes / seconds / 1e9:5.1f} GB/s of blocks, "
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
