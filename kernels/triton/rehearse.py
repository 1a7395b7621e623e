"""Every kernel that a model will use, launched once on nothing, so that it is compiled by then.

What is compiled is kept by Triton on disk (TRITON_CACHE_DIR): only the first start on a machine
takes the time, and that while weights are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.draw import NUMBERS
from kernels.triton.decode_attention import decode_attention
from kernels.triton.draw import draw
from kernels.triton.gated import silu_mul
from kernels.triton.grouped_matmul import grouped_matmul
from kernels.triton.kv_write import write_kv, write_latents
from kernels.triton.latent_attention import latent_decode_attention
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.rms_norm import add_rms_norm, rms_norm
from kernels.triton.rotary import rotate

_BLOCK, _CHUNK, _VOCABULARY = 16, 17, 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model, as `kernels.layers` names them. `widths`: of its gated MLPs; `normed`: norms on
    single heads; `rank` 0: no latents; `experts`: (count, width) or None."""

    hidden: int
    widths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    windows: tuple[int | None, ...] = (None,)
    normed: bool = False
    rank: int = 0
    experts: tuple[int, int] | None = None


def rehearse(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    """One row of one token and one chunk, through every kernel."""

    def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    x, weight = zeros(_CHUNK, sizes.hidden), zeros(sizes.hidden)
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, x.clone(), weight, 1e-6)
    given, one = zeros(1, NUMBERS, kind=torch.float64), zeros(1, kind=torch.int64)
    draw(zeros(1, _VOCABULARY, kind=torch.float32), given, one.bool(), one)
    for width in sizes.widths:
        silu_mul(zeros(_CHUNK, 2 * width))
    if sizes.experts is not None:
        count, width = sizes.experts
        offsets = zeros(count + 1, kind=torch.int32)
        offsets[1:] = _CHUNK
        inner = silu_mul(grouped_matmul(x, zeros(count, 2 * width, sizes.hidden), offsets))
        grouped_matmul(inner, zeros(count, sizes.hidden, width), offsets)
    tables, spans = zeros(1, 2, kind=torch.int32), zeros(1, 3, kind=torch.int32)
    tables[0, 1] = 1
    spans[0, 1] = _CHUNK
    angle = zeros(_CHUNK, sizes.rotary_dim // 2, kind=torch.float32)
    slots = torch.arange(_CHUNK, device=device)
    if sizes.rank:
        _latents(sizes, zeros(_CHUNK, sizes.heads, sizes.rank + sizes.rotary_dim), angle, slots)
        return
    qkv = zeros(_CHUNK, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
    queries, keys = qkv[:, : sizes.heads], qkv[:, sizes.heads : -sizes.kv_heads]
    norm = zeros(sizes.head_dim)
    norms = (norm, norm) if sizes.normed else None
    rotate(queries, keys, angle, angle, norms=norms, eps=1e-6)
    kv = zeros(2, 2, sizes.kv_heads, _BLOCK, sizes.head_dim)
    write_kv(keys, qkv[:, -sizes.kv_heads :], kv, slots)
    for window in sizes.windows:
        decode_attention(queries[:1], kv, tables, spans[:, 2], 1, 1.0, window=window)
        prefill_attention(queries, kv, tables, spans, 1.0, window=window)


def _latents(sizes: Sizes, queries: Tensor, angle: Tensor, slots: Tensor) -> None:
    rank = sizes.rank
    latents = torch.zeros_like(queries[:, 0])
    rotate(queries[:, :, rank:], latents[:, None, rank:], angle, angle)
    rms_norm(latents[:, :rank], torch.zeros_like(latents[0, :rank]), 1e-6)
    pool = latents.new_zeros(2, _BLOCK, latents.shape[1])
    write_latents(latents, pool, slots)
    tables = torch.zeros((1, 2), dtype=torch.int32, device=queries.device)
    latent_decode_attention(queries[:1], pool, tables, tables[:, 0], 1, 1.0, rank=rank)
