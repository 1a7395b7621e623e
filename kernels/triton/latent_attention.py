"""Attention of one new token a row over a compressed KV: multi-head latent attention, absorbed.

With the up-projections folded into the query and the output (DeepSeek-V2, 2024, §2.1.2), all heads
share one cached vector a token, c (rank) and k_rope (rope), and out[h] =
softmax((q[h]·[c, k_rope]ᵀ) · scale) · c. Heads are the rows of the products; the latents of a tile
serve as keys and as values from one read.

Bytes: context · (rank + rope) · element. FLOPs: 2 · context · heads · (2·rank + rope). With 128
heads in bf16 that is 242 FLOPs a byte, near an H200's ridge (about 200): whichever is
nearer; with 16 heads a rank: memory.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.online import rescale
from kernels.triton.paged import check, padded
from kernels.triton.split import Partials, store_part


def latent_decode_attention(
    queries: Tensor,
    latents: Tensor,
    tables: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    *,
    rank: int,
    splits: int | None = None,
) -> Tensor:
    """queries [rows, heads, rank + rope], absorbed → [rows, heads, rank], before up-projection.

    latents [blocks, block_tokens, rank + rope], strided: one layer of the pool without its k/v and
    head axes, which have one entry. tables, starts, `longest` as in `decode_attention`.
    """
    rows, heads, width = queries.shape
    check(queries, latents, tables)
    out = torch.empty((rows, heads, rank), dtype=queries.dtype, device=queries.device)
    if rows == 0:
        return out
    wide = queries.dtype == torch.float32
    tall = min(16 if wide else 64, padded(heads))
    groups = triton.cdiv(heads, tall)
    partials = Partials.planned(out, groups, longest, splits)
    _latent[(rows, groups, partials.count)](
        queries,
        latents,
        tables,
        starts,
        partials.sums,
        partials.logs,
        heads,
        scale * math.log2(math.e),
        queries.stride(0),
        queries.stride(1),
        latents.stride(0),
        latents.stride(1),
        tables.stride(0),
        starts.stride(0),
        TALL=tall,
        RANK=rank,
        RANK_PAD=padded(rank),
        ROPE=width - rank,
        ROPE_PAD=padded(width - rank),
        BLOCK=latents.shape[1],
        TILE=16 if wide else 32,
        num_warps=8 if tall == 64 else 4,
        num_stages=2,
    )
    partials.reduce(out)
    return out


@triton.jit(do_not_specialize=["table_row", "starts_row"])
def _latent(
    queries,
    latents,
    tables,
    starts,
    sums,
    logs,
    all_heads,
    scale,
    q_row,
    q_head,
    block_stride,
    token_stride,
    table_row,
    starts_row,
    TALL: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    context = tl.load(starts + row * starts_row) + 1
    each = tl.cdiv(tl.cdiv(context, TILE), tl.num_programs(2))
    begin = tl.program_id(2) * each * TILE
    end = tl.minimum(begin + each * TILE, context)

    heads = tl.program_id(1) * TALL + tl.arange(0, TALL)
    present = heads < all_heads
    deep = tl.arange(0, RANK_PAD)
    turned = tl.arange(0, ROPE_PAD)
    inside = tl.arange(0, TILE)
    q_base = queries + row.to(tl.int64) * q_row + heads[:, None] * q_head
    q_deep = tl.load(
        q_base + deep[None, :], mask=present[:, None] & (deep < RANK)[None, :], other=0.0
    )
    q_turned = tl.load(
        q_base + RANK + turned[None, :],
        mask=present[:, None] & (turned < ROPE)[None, :],
        other=0.0,
    )
    acc = tl.zeros((TALL, RANK_PAD), dtype=tl.float32)
    peak = tl.full((TALL,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TALL,), dtype=tl.float32)
    table = tables + row.to(tl.int64) * table_row
    for at in range(begin, end, TILE):
        tokens = at + inside
        seen = tokens < end
        block = tl.load(table + tokens // BLOCK, mask=seen, other=0).to(tl.int64)
        base = latents + block * block_stride + (tokens % BLOCK) * token_stride
        latent = tl.load(
            base[:, None] + deep[None, :],
            mask=seen[:, None] & (deep < RANK)[None, :],
            other=0.0,
        )
        key = tl.load(
            base[None, :] + RANK + turned[:, None],
            mask=seen[None, :] & (turned < ROPE)[:, None],
            other=0.0,
        )
        scores = tl.dot(q_deep, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_turned, key, scores, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        peak, shift, factor = rescale(peak, scores)
        share = tl.exp2(scores - shift[:, None])
        total = total * factor + tl.sum(share, 1)
        acc = acc * factor[:, None]
        acc = tl.dot(share.to(latent.dtype), latent, acc, input_precision="ieee")
    store_part(acc, peak, total, sums, logs, row, heads, all_heads, present, RANK, RANK_PAD)
