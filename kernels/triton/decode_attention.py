"""Attention of one new token a row over its paged context, grouped query heads, split.

out[h] = softmax(q[h]·Kᵀ · scale) · V with K, V of KV head h // group; the query heads of one KV
head are the rows of one matrix product, so that its keys and values are read once. A window w
leaves the last w tokens. Parts of a row go to different programs, `split.Partials` joins them;
each program finds its part from the row's own context, so that a captured graph serves any lengths.

Bytes: 2 · context · kv_heads · dim · element of KV, for all rows. FLOPs: 4 · context · heads · dim.
With a group of 8 in bf16 that is 8 FLOPs a byte: memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.online import attend
from kernels.triton.paged import check, constants, numbers, padded
from kernels.triton.split import Partials, store_part


def decode_attention(
    queries: Tensor,
    kv: Tensor,
    tables: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    *,
    window: int | None = None,
    splits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """queries [rows, heads, dim] → the same shape.

    kv [blocks, 2, kv_heads, block_tokens, dim], strided; tables [rows, blocks] int32; starts [rows]
    int32: the position of each row's token, whose own KV is in place already; −1 makes a row of
    zeros. `longest` bounds the contexts and only steers the number of `splits`.
    """
    rows, heads, dim = queries.shape
    kv_heads = kv.shape[2]
    check(queries, kv, tables)
    if out is None:
        out = torch.empty((rows, heads, dim), dtype=queries.dtype, device=queries.device)
    if rows == 0:
        return out
    if window is not None:
        longest = min(longest, window)
    partials = Partials.planned(out, kv_heads, longest, splits)
    shape = constants(queries, kv, window)
    _decode[(rows, kv_heads, partials.count)](
        queries,
        kv,
        tables,
        starts,
        partials.sums,
        partials.logs,
        *numbers(queries, kv, tables, starts, scale, window),
        GROUP_PAD=padded(shape["GROUP"]),
        TILE=32 if queries.dtype == torch.float32 or dim > 128 else 64,
        num_warps=4,
        num_stages=3,
        **shape,
    )
    partials.reduce(out)
    return out


@triton.jit(do_not_specialize=["window", "table_row", "starts_row"])
def _decode(
    queries,
    kv,
    tables,
    starts,
    sums,
    logs,
    scale,
    window,
    q_row,
    q_head,
    kv_block,
    kv_value,
    kv_head,
    kv_token,
    table_row,
    starts_row,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    row = tl.program_id(0)
    kv_index = tl.program_id(1)
    context = tl.load(starts + row * starts_row) + 1
    floor = 0
    if WINDOWED:
        floor = tl.maximum(context - window, 0)
    first = floor // TILE
    each = tl.cdiv(tl.cdiv(context, TILE) - first, tl.num_programs(2))
    begin = (first + tl.program_id(2) * each) * TILE
    end = tl.minimum(begin + each * TILE, context)

    member = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    heads = kv_index * GROUP + member
    query = tl.load(
        queries + row.to(tl.int64) * q_row + heads[:, None] * q_head + dims[None, :],
        mask=(member < GROUP)[:, None] & (dims < DIM)[None, :],
        other=0.0,
    )
    acc = tl.zeros((GROUP_PAD, DIM_PAD), dtype=tl.float32)
    peak = tl.full((GROUP_PAD,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((GROUP_PAD,), dtype=tl.float32)
    acc, peak, total = attend(
        acc,
        peak,
        total,
        query,
        tl.zeros((GROUP_PAD,), dtype=tl.int32) + (context - 1),
        begin,
        end,
        floor,
        tables + row.to(tl.int64) * table_row,
        kv + kv_index * kv_head,
        kv_block,
        kv_value,
        kv_token,
        scale,
        window,
        DIM,
        DIM_PAD,
        BLOCK,
        TILE,
        True,
        WINDOWED,
    )
    present = member < GROUP
    store_part(
        acc,
        peak,
        total,
        sums,
        logs,
        row,
        heads,
        tl.num_programs(1) * GROUP,
        present,
        DIM,
        DIM_PAD,
    )
