"""The loop that the attention kernels share: online softmax over tiles of paged keys and values.

For a tile of tokens T: s = q·Kᵀ·scale, m' = max(m, max s), p = 2^(s − m'), and then
acc ← acc · 2^(m − m') + p·V, l ← l · 2^(m − m') + Σp (Milakov & Gimelshein 2018; Dao 2022).
Scores are in base 2: `scale` carries log2 e.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rescale(peak, scores):
    """New peak, what it stands for in exponents (0 where nothing was seen yet), and the factor
    for what was summed under the old one."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, shift, tl.exp2(peak - shift)


@triton.jit
def attend(
    acc,
    peak,
    total,
    queries,
    positions,
    begin,
    end,
    floor,
    table,
    keys,
    kv_block,
    kv_value,
    kv_token,
    scale,
    window,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Tokens [begin, end) of one KV head; `begin` is a multiple of TILE.

    queries [M, DIM_PAD] of `positions` [M]. Nothing below `floor` or from `end` on is read. Without
    MASKED, all tiles must be whole and no query may precede any of their tokens.
    """
    inside = tl.arange(0, TILE)
    dims = tl.arange(0, DIM_PAD)
    for at in range(begin, end, TILE):
        tokens = at + inside
        readable = tokens < end
        if WINDOWED:
            readable = readable & (tokens >= floor)
        if MASKED or WINDOWED:
            block = tl.load(table + tokens // BLOCK, mask=readable, other=0)
        else:
            block = tl.load(table + tokens // BLOCK)
        base = keys + block.to(tl.int64) * kv_block + (tokens % BLOCK) * kv_token
        if MASKED or WINDOWED:
            key = tl.load(
                base[None, :] + dims[:, None],
                mask=readable[None, :] & (dims < DIM)[:, None],
                other=0.0,
            )
        elif DIM == DIM_PAD:
            key = tl.load(base[None, :] + dims[:, None])
        else:
            key = tl.load(base[None, :] + dims[:, None], mask=(dims < DIM)[:, None], other=0.0)
        scores = tl.dot(queries, key, input_precision="ieee") * scale
        if MASKED:
            seen = readable[None, :] & (tokens[None, :] <= positions[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        if WINDOWED:
            near = tokens[None, :] > (positions - window)[:, None]
            scores = tl.where(near, scores, float("-inf"))
        peak, shift, factor = rescale(peak, scores)
        share = tl.exp2(scores - shift[:, None])
        total = total * factor + tl.sum(share, 1)
        if MASKED or WINDOWED:
            value = tl.load(
                base[:, None] + kv_value + dims[None, :],
                mask=readable[:, None] & (dims < DIM)[None, :],
                other=0.0,
            )
        elif DIM == DIM_PAD:
            value = tl.load(base[:, None] + kv_value + dims[None, :])
        else:
            value = tl.load(
                base[:, None] + kv_value + dims[None, :], mask=(dims < DIM)[None, :], other=0.0
            )
        acc = acc * factor[:, None]
        acc = tl.dot(share.to(value.dtype), value, acc, input_precision="ieee")
    return acc, peak, total
