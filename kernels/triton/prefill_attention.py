"""Causal attention of chunks of new tokens over cached prefixes and themselves, ragged, mixed.

Row r owns tokens [first, first + length) of the batch, at positions start…: token i sees positions
0…start+i of its row, or the last w of them under a window w. A tile holds ROWS = tokens × the query
heads of one KV head. The tile's row is found by bisection: row r begins at tile
(first − first of row 0) // Q + r, which leaves at most one idle tile a row and needs no map from
the host. Tiles that end before the tile's first query run without masks.

FLOPs: 4 · heads · dim · pairs of a query and a token it sees (half of all for a chunk without a
prefix). Bytes: Q, out, and 2 · context · kv_heads · dim for every Q tokens. From about 300
FLOPs a byte on (8k causal: thousands): the matrix units.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.online import attend
from kernels.triton.paged import check, constants, numbers
from kernels.triton.ragged import find_row


def prefill_attention(
    queries: Tensor,
    kv: Tensor,
    tables: Tensor,
    spans: Tensor,
    scale: float,
    *,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """queries [tokens, heads, dim] → the same shape; tokens of no row are left as they are.

    kv [blocks, 2, kv_heads, block_tokens, dim], strided, the new tokens' KV in place already;
    tables [rows, blocks] int32; spans [rows, 3] int32: (first, length, start) of each row, in
    order and without gaps, which is cu_seqlens beside the starts. Length 0 is allowed. `queries`
    may begin at row 0's first token or earlier.
    """
    tokens, heads, dim = queries.shape
    rows, kv_heads = spans.shape[0], kv.shape[2]
    check(queries, kv, tables, spans)
    if out is None:
        out = torch.empty((tokens, heads, dim), dtype=queries.dtype, device=queries.device)
    if rows == 0 or tokens == 0:
        return out
    shape = constants(queries, kv, window)
    narrow = queries.dtype != torch.float32 and dim <= 128
    height = max(128 if narrow else 32, triton.next_power_of_2(shape["GROUP"]))
    q_tile = height // shape["GROUP"]
    _prefill[(tokens // q_tile + rows, kv_heads)](
        queries,
        kv,
        tables,
        spans,
        out,
        rows,
        *numbers(queries, kv, tables, spans, scale, window),
        out.stride(0),
        out.stride(1),
        Q=q_tile,
        ROWS=height,
        TILE=64 if narrow else 32,
        num_warps=8 if narrow else 4,
        num_stages=3 if narrow else 2,
        **shape,
    )
    return out


@triton.jit(do_not_specialize=["rows", "window", "table_row", "span_row"])
def _prefill(
    queries,
    kv,
    tables,
    spans,
    out,
    rows,
    scale,
    window,
    q_token,
    q_head,
    kv_block,
    kv_value,
    kv_head,
    kv_token,
    table_row,
    span_row,
    out_token,
    out_head,
    GROUP: tl.constexpr,
    Q: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest contexts begin first
    kv_index = tl.program_id(1)
    row = find_row(spans, rows, span_row, tile, Q)
    first = tl.load(spans + row * span_row)
    length = tl.load(spans + row * span_row + 1)
    start = tl.load(spans + row * span_row + 2)
    ahead = (tile - (first - tl.load(spans)) // Q - row) * Q
    if ahead >= length:
        return

    line = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    token = ahead + line // GROUP
    heads = kv_index * GROUP + line % GROUP
    wanted = ((line < Q * GROUP) & (token < length))[:, None] & (dims < DIM)[None, :]
    place = (first + token).to(tl.int64)
    query = tl.load(
        queries + place[:, None] * q_token + heads[:, None] * q_head + dims[None, :],
        mask=wanted,
        other=0.0,
    )
    positions = start + token
    floor = 0
    if WINDOWED:
        floor = tl.maximum(start + ahead - window + 1, 0)
    end = start + tl.minimum(ahead + Q, length)
    begin = floor // TILE * TILE
    whole = tl.maximum((start + ahead + 1) // TILE * TILE, begin)

    acc = tl.zeros((ROWS, DIM_PAD), dtype=tl.float32)
    peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    table = tables + row.to(tl.int64) * table_row
    keys = kv + kv_index * kv_head
    acc, peak, total = attend(
        acc,
        peak,
        total,
        query,
        positions,
        begin,
        whole,
        floor,
        table,
        keys,
        kv_block,
        kv_value,
        kv_token,
        scale,
        window,
        DIM,
        DIM_PAD,
        BLOCK,
        TILE,
        False,
        WINDOWED,
    )
    acc, peak, total = attend(
        acc,
        peak,
        total,
        query,
        positions,
        whole,
        end,
        floor,
        table,
        keys,
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
    mixed = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out + place[:, None] * out_token + heads[:, None] * out_head + dims[None, :],
        mixed.to(out.dtype.element_ty),
        mask=wanted,
    )
