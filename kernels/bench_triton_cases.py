"""What `bench_triton` measures: each kernel on given sizes, with its bytes and FLOPs counted.

Kernels are imported when a case is built, because triton is there on Linux only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import block_copy as copy_reference
from kernels import gated as gated_reference
from kernels import grouped_matmul as grouped_reference
from kernels import kv_write as write_reference
from kernels import latent_attention as latent_reference
from kernels import rms_norm as norm_reference
from kernels.paged_attention import PagedRows, paged_attention
from kernels.rotary import angles, rotary

BLOCK, DIM, GROUP, RANK, ROPE = 16, 128, 8, 512, 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """`rows` sequences of `context` tokens for decode, a prompt of `prompt` tokens, `tokens` for
    what goes token by token, `blocks` moved at once, `routed` tokens an expert."""

    rows: int
    context: int
    prompt: int
    tokens: int
    kv_heads: int
    latent_heads: int
    hidden: int
    width: int
    blocks: int
    layers: int
    experts: int
    routed: int


FULL = Sizes(64, 8192, 8192, 65536, 8, 128, 4096, 14336, 256, 32, 64, 256)
SMALL = Sizes(2, 90, 50, 5, 1, 20, 192, 96, 3, 2, 3, 9)


@dataclass(frozen=True, slots=True)
class Case:
    """`expected` computes in fp32 and changes nothing; `run` may work in place."""

    name: str
    run: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    bytes: int
    flops: int = 0
    target: float | None = None
    floor: float | None = None

    @property
    def goals(self) -> tuple[float | None, float | None]:
        return self.target, self.floor


Builder = Callable[[Sizes, torch.device, torch.dtype], Case]


def made(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def paged(rows: int, start: int, length: int, device: torch.device) -> tuple[PagedRows, int]:
    """`rows` rows of `length` new tokens from `start` on, in shuffled blocks; how many blocks."""
    each = -(-(start + length) // BLOCK)
    tables = torch.randperm(rows * each, device=device, dtype=torch.int32).view(rows, each)
    spans = [(row * length, length, start) for row in range(rows)]
    group = PagedRows(
        starts=(start,) * rows,
        lengths=(length,) * rows,
        decode=rows if length == 1 else 0,
        tables=tables,
        slots=torch.empty(0, dtype=torch.int64, device=device),
        spans=torch.tensor(spans, dtype=torch.int32, device=device),
    )
    return group, rows * each


def decode(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    from kernels.triton.decode_attention import decode_attention

    rows, blocks = paged(sizes.rows, sizes.context - 1, 1, device)
    kv = made(blocks, 2, 2, sizes.kv_heads, BLOCK, DIM, device=device, dtype=dtype)[:, 1]
    q = made(sizes.rows, sizes.kv_heads * GROUP, DIM, device=device, dtype=dtype)
    starts, scale = rows.spans[:, 2], DIM**-0.5
    read = sizes.rows * sizes.context * 2 * sizes.kv_heads * DIM * dtype.itemsize
    return Case(
        f"decode attention, {sizes.rows} × {sizes.context}, GQA {GROUP}",
        lambda: decode_attention(q, kv, rows.tables, starts, sizes.context, scale),
        lambda: paged_attention(q.float(), kv.float(), rows, scale),
        bytes=read + 2 * q.nbytes,
        flops=4 * sizes.rows * sizes.context * q.shape[1] * DIM,
        target=0.85,
        floor=0.70,
    )


def prefill(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    from kernels.triton.prefill_attention import prefill_attention

    rows, blocks = paged(1, 0, sizes.prompt, device)
    kv = made(blocks, 2, 2, sizes.kv_heads, BLOCK, DIM, device=device, dtype=dtype)[:, 1]
    q = made(sizes.prompt, sizes.kv_heads * GROUP, DIM, device=device, dtype=dtype)
    scale = DIM**-0.5
    return Case(
        f"prefill attention, {sizes.prompt} causal",
        lambda: prefill_attention(q, kv, rows.tables, rows.spans, scale),
        lambda: paged_attention(q.float(), kv.float(), rows, scale),
        bytes=2 * q.nbytes + 2 * sizes.prompt * sizes.kv_heads * DIM * dtype.itemsize,
        flops=4 * q.shape[1] * DIM * (sizes.prompt * (sizes.prompt + 1) // 2),
        target=0.55,
        floor=0.40,
    )


def latent(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    return _latent(sizes, device, dtype, sizes.latent_heads, 0.70, 0.50)


def latent_of_a_rank(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    return _latent(sizes, device, dtype, 16, None, None)


def _latent(
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    target: float | None,
    floor: float | None,
) -> Case:
    from kernels.triton.latent_attention import latent_decode_attention

    rows, blocks = paged(sizes.rows, sizes.context - 1, 1, device)
    latents = made(blocks, 2, BLOCK, RANK + ROPE, device=device, dtype=dtype)[:, 1]
    q = made(sizes.rows, heads, RANK + ROPE, device=device, dtype=dtype)
    starts, scale = rows.spans[:, 2], (DIM + ROPE) ** -0.5
    tokens = sizes.rows * sizes.context

    def run() -> Tensor:
        return latent_decode_attention(
            q, latents, rows.tables, starts, sizes.context, scale, rank=RANK
        )

    return Case(
        f"latent decode, {sizes.rows} × {sizes.context}, {heads} heads",
        run,
        lambda: latent_reference.latent_attention(q.float(), latents.float(), rows, scale, RANK),
        bytes=tokens * (RANK + ROPE) * dtype.itemsize + 2 * q.nbytes,
        flops=2 * tokens * heads * (2 * RANK + ROPE),
        target=target,
        floor=floor,
    )


def norm(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    from kernels.triton.rms_norm import add_rms_norm

    x = made(sizes.tokens, sizes.hidden, device=device, dtype=dtype)
    residual, weight = torch.zeros_like(x), made(sizes.hidden, device=device, dtype=dtype)
    return Case(
        f"RMSNorm with residual, {sizes.tokens} × {sizes.hidden}",
        lambda: add_rms_norm(x, residual, weight, 1e-5),
        lambda: norm_reference.rms_norm((x + residual).float(), weight.float(), 1e-5),
        bytes=4 * x.nbytes,
        target=0.85,
        floor=0.70,
    )


def turn(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    from kernels.triton.rotary import rotate

    heads, kv_heads = sizes.kv_heads * 4, sizes.kv_heads
    qkv = made(sizes.tokens, heads + 2 * kv_heads, DIM, device=device, dtype=dtype)
    both = qkv[:, : heads + kv_heads]
    q, k = both[:, :heads], both[:, heads:]
    positions = torch.arange(sizes.tokens, device=device)
    cos, sin = angles(positions, torch.rand(DIM // 2, device=device))

    def run() -> Tensor:
        rotate(q, k, cos, sin)
        return both

    return Case(
        f"rotary, {sizes.tokens} × ({heads} + {kv_heads}) heads",
        run,
        lambda: rotary(both.float(), cos, sin),
        bytes=2 * both.numel() * dtype.itemsize + cos.nbytes + sin.nbytes,
        target=0.85,
        floor=0.70,
    )


def gate(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    from kernels.triton.gated import silu_mul

    gate_up = made(sizes.tokens // 2, 2 * sizes.width, device=device, dtype=dtype)
    return Case(
        f"gated activation, {sizes.tokens // 2} × {sizes.width}",
        lambda: silu_mul(gate_up),
        lambda: gated_reference.silu_mul(gate_up.float()),
        bytes=gate_up.nbytes * 3 // 2,
        target=0.85,
        floor=0.70,
    )


def write(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    from kernels.triton.kv_write import write_kv

    keys, values = made(2, sizes.tokens, sizes.kv_heads, DIM, device=device, dtype=dtype)
    blocks = -(-sizes.tokens // BLOCK)
    kv = torch.zeros((blocks, 2, 2, sizes.kv_heads, BLOCK, DIM), device=device, dtype=dtype)[:, 1]
    places = torch.randperm(blocks, device=device)[:, None] * BLOCK
    slots = (places + torch.arange(BLOCK, device=device)).flatten()[: sizes.tokens].contiguous()

    def run() -> Tensor:
        write_kv(keys, values, kv, slots)
        return kv

    def expected() -> Tensor:
        wanted = torch.zeros_like(kv)
        write_reference.write_kv(keys, values, wanted, slots)
        return wanted

    return Case(
        f"KV write, {sizes.tokens} tokens",
        run,
        expected,
        bytes=2 * (keys.nbytes + values.nbytes) + slots.nbytes,
        target=0.85,
        floor=0.70,
    )


def gather(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    return _moved(sizes, device, dtype, gathered=True)


def scatter(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    return _moved(sizes, device, dtype, gathered=False)


def _moved(sizes: Sizes, device: torch.device, dtype: torch.dtype, *, gathered: bool) -> Case:
    """Half of the heads."""
    from kernels.triton.block_copy import gather_blocks, scatter_blocks

    count = sizes.kv_heads
    shape = (sizes.layers, 2, 2 * count, BLOCK, DIM)
    pool = made(2 * sizes.blocks, *shape, device=device, dtype=dtype)
    piece = made(sizes.blocks, *shape[:2], count, BLOCK, DIM, device=device, dtype=dtype)
    ids = torch.randperm(2 * sizes.blocks, device=device)[: sizes.blocks]

    def run() -> Tensor:
        if gathered:
            gather_blocks(pool, ids, piece, count)
            return piece
        scatter_blocks(piece, ids, pool, count)
        return pool

    def expected() -> Tensor:
        if gathered:
            wanted = torch.zeros_like(piece)
            copy_reference.gather_blocks(pool, ids, wanted, count)
        else:
            wanted = pool.clone()
            copy_reference.scatter_blocks(piece, ids, wanted, count)
        return wanted

    verb = "gather" if gathered else "scatter"
    return Case(
        f"{verb} of {sizes.blocks} blocks, {count} of {2 * count} heads",
        run,
        expected,
        bytes=2 * piece.nbytes,
    )


def experts(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    return _grouped(sizes, device, dtype, sizes.routed)


def experts_of_few(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    return _grouped(sizes, device, dtype, 2)


def _grouped(sizes: Sizes, device: torch.device, dtype: torch.dtype, each: int) -> Case:
    from kernels.triton.grouped_matmul import grouped_matmul

    tokens, out = each * sizes.experts, sizes.hidden // 2
    x = made(tokens, sizes.hidden, device=device, dtype=dtype)
    weights = made(sizes.experts, out, sizes.hidden, device=device, dtype=dtype)
    offsets = torch.arange(sizes.experts + 1, device=device, dtype=torch.int32) * each
    return Case(
        f"grouped product, {sizes.experts} experts × {each} tokens",
        lambda: grouped_matmul(x, weights, offsets),
        lambda: grouped_reference.grouped_matmul(x.float(), weights.float(), offsets),
        bytes=weights.nbytes + x.nbytes + tokens * out * dtype.itemsize,
        flops=2 * tokens * out * sizes.hidden,
    )


BUILDERS: tuple[Builder, ...] = (
    decode,
    prefill,
    latent,
    latent_of_a_rank,
    norm,
    turn,
    gate,
    write,
    gather,
    scatter,
    experts,
    experts_of_few,
)
