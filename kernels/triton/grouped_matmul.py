"""One product a group of rows, each with its own weight: the experts of a mixture.

out[t] = x[t] · W_eᵀ for the tokens t of expert e, which lie together, [offsets[e], offsets[e+1]).
Experts may have any number of tokens, none included; a tile finds its expert by bisection
(`ragged.find_row`), so that the counts never leave the device.

FLOPs: 2 · tokens · in · out. Bytes: the weights of experts that have tokens, x and out. Below about
200 tokens an expert in bf16: memory (the weights); above: the matrix units.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.ragged import find_row


def grouped_matmul(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """x [tokens, in], sorted by expert; weights [experts, out, in]; offsets [experts + 1] int32.

    Returns [tokens, out] in the dtype of `x`. offsets[0] = 0 and offsets[-1] = tokens.
    """
    tokens, depth = x.shape
    experts, width, _ = weights.shape
    if x.stride(1) != 1 or weights.stride(2) != 1:
        raise ValueError("x and weights need a contiguous last axis")
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    wide = x.dtype == torch.float32
    mean = -(-tokens // experts)
    tall = min(64 if wide else 128, max(16, triton.next_power_of_2(mean)))
    columns = 64 if wide else 128
    _grouped[(tokens // tall + experts, triton.cdiv(width, columns))](
        x,
        weights,
        offsets,
        out,
        experts,
        depth,
        width,
        x.stride(0),
        weights.stride(0),
        weights.stride(1),
        TALL=tall,
        COLUMNS=columns,
        DEPTH=32 if wide else 64,
        num_warps=8 if tall >= 128 else 4,
        num_stages=3,
    )
    return out


@triton.jit
def _grouped(
    x,
    weights,
    offsets,
    out,
    experts,
    depth,
    width,
    x_token,
    w_expert,
    w_row,
    TALL: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = find_row(offsets, experts, 1, tile, TALL)
    first = tl.load(offsets + expert)
    last = tl.load(offsets + expert + 1)
    begin = first + (tile - first // TALL - expert) * TALL
    if begin >= last:
        return
    token = begin + tl.arange(0, TALL)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    left = x + token.to(tl.int64)[:, None] * x_token + inner[None, :]
    right = (
        weights
        + expert.to(tl.int64) * w_expert
        + column.to(tl.int64)[None, :] * w_row
        + inner[:, None]
    )
    acc = tl.zeros((TALL, COLUMNS), dtype=tl.float32)
    for at in range(0, depth, DEPTH):
        within = at + inner < depth
        a = tl.load(left + at, mask=(token < last)[:, None] & within[None, :], other=0.0)
        b = tl.load(right + at, mask=(column < width)[None, :] & within[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(
        out + token.to(tl.int64)[:, None] * width + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=(token < last)[:, None] & (column < width)[None, :],
    )
