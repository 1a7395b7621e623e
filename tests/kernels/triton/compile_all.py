"""Compile every kernel for a GPU that need not be there, from bf16 launches of real sizes.

Run with TRITON_INTERPRET=0; prints one JSON object a kernel: name, arch, bytes of shared memory
and of the stack a program, and how many instructions of some kinds its PTX has.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.triton import split
from kernels.triton.block_copy import gather_blocks, scatter_blocks
from kernels.triton.decode_attention import decode_attention
from kernels.triton.draw import draw
from kernels.triton.gated import silu_mul
from kernels.triton.grouped_matmul import grouped_matmul
from kernels.triton.kv_write import write_kv, write_latents
from kernels.triton.latent_attention import latent_decode_attention
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.rms_norm import add_rms_norm, rms_norm
from kernels.triton.rotary import rotate

TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")


class Absent:
    """As much of a driver as the compiler asks for."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launches(dtype: torch.dtype) -> list[Callable[[], object]]:
    def made(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    kv, pool = made(8, 2, 2, 8, 16, 128)[:, 1], made(8, 2, 2, 8, 16, 128)
    latents = made(8, 2, 16, 576)[:, 1]
    tables = torch.zeros(64, 512, dtype=torch.int32)
    starts = torch.zeros(64, dtype=torch.int32)
    spans = torch.zeros(4, 3, dtype=torch.int32)
    long = torch.zeros(64, dtype=torch.int64)
    q, x = made(64, 64, 128), made(64, 4096)
    small, odd = made(64, 9, 64), made(8, 2, 3, 16, 64)
    experts = made(8, 256, 2048)
    offsets = torch.zeros(9, dtype=torch.int32)
    return [
        partial(decode_attention, q, kv, tables, starts, 8192, 0.1),
        partial(decode_attention, small, odd, tables, starts, 8192, 0.1, window=1024),
        partial(prefill_attention, q, kv, tables, spans, 0.1),
        partial(prefill_attention, small, odd, tables[:1], spans[:1], 0.1, window=1024),
        partial(latent_decode_attention, made(64, 128, 576), latents, tables, starts, 8192, 0.1,
                rank=512),
        partial(latent_decode_attention, made(64, 16, 576), latents, tables, starts, 8192, 0.1,
                rank=512),
        partial(write_kv, q[:, :8], q[:, 8:16], kv, long),
        partial(write_latents, latents[:4].flatten(0, 1), latents, long),
        partial(gather_blocks, pool, long[:4], made(4, 2, 2, 2, 16, 128)),
        partial(scatter_blocks, made(4, 2, 2, 2, 16, 128), long[:4], pool),
        partial(rms_norm, x, x[0], 1e-5),
        partial(add_rms_norm, x, x.clone(), x[0], 1e-5),
        partial(rotate, q, q[:, :8], torch.zeros(64, 64), torch.zeros(64, 64)),
        partial(rotate, q, q[:, :8], torch.zeros(64, 64), torch.zeros(64, 64),
                norms=(q[0, 0], q[0, 1]), eps=1e-5),
        partial(silu_mul, x),
        partial(draw, torch.zeros(64, 128256), torch.zeros(64, 5, dtype=torch.float64),
                long.bool(), long),
        partial(grouped_matmul, made(4096, 2048), experts, offsets),
        partial(grouped_matmul, made(64, 2048), experts, offsets),
    ]  # fmt: skip


def main() -> None:
    arch = int(sys.argv[1])
    driver.set_active(Absent(arch))
    split.processors = lambda device: 132  # type: ignore[assignment]  # an H200's

    def compiled(self: JITFunction, grid: object) -> Callable[..., None]:  # type: ignore[type-arg,unused-ignore]  # generic in triton's own stubs only
        def launch(*arguments: object, **options: object) -> None:
            report(arch, self.fn.__name__, self.run(*arguments, grid=grid, warmup=True, **options))

        return launch

    JITFunction.__getitem__ = compiled
    for launch in launches(torch.bfloat16):
        launch()


def report(arch: int, name: str, kernel: object) -> None:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])  # type: ignore[attr-defined]  # triton's CompiledKernel
        file.flush()
        usage = subprocess.run(
            [os.path.join(TOOLS, "cuobjdump"), "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    ptx: str = kernel.asm["ptx"]  # type: ignore[attr-defined]
    print(
        json.dumps(
            {
                "name": name,
                "arch": arch,
                "shared": kernel.metadata.shared,  # type: ignore[attr-defined]
                "registers": int(found[1]),
                "stack": int(found[2]),
                "wgmma": ptx.count("wgmma.mma_async"),
                "mma": ptx.count("mma.sync"),
                "wide": ptx.count(".v4.b32"),
                "async": ptx.count("cp.async.cg"),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
