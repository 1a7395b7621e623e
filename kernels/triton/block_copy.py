"""Gather blocks of the pool into one piece for a transfer, and scatter a received piece.

A piece has the pool's order, [n, layer, k/v, head, token, dim], for the heads that both sides
share: a range of heads of one (block, layer, k/v) lies together on both sides, so each program
moves a run of it.

Bytes: 2 · n · layers · k/v · heads · block_tokens · dim · element: memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

RUN = 4096
"""Elements a program moves."""


def gather_blocks(pool: Tensor, ids: Tensor, piece: Tensor, head: int = 0) -> None:
    """piece [n, layers, k/v, heads, block_tokens, dim] ← blocks `ids` [n] of `pool`, from `head`.

    Both in the pool's order and dtype, heads contiguous. A negative id leaves its part alone.
    """
    _launch(pool, ids, piece, head, gather=True)


def scatter_blocks(piece: Tensor, ids: Tensor, pool: Tensor, head: int = 0) -> None:
    """The way back: `piece` → blocks `ids`, all different, of `pool`, heads from `head` on."""
    _launch(pool, ids, piece, head, gather=False)


def _launch(pool: Tensor, ids: Tensor, piece: Tensor, head: int, *, gather: bool) -> None:
    count, layers, values, heads, tokens, dim = piece.shape
    run = tokens * dim
    together = (run, dim, 1)
    if (piece.stride()[3:], pool.stride()[3:]) != (together, together):
        raise ValueError("heads, tokens and dim of pool and piece must lie together")
    if head < 0 or head + heads > pool.shape[3] or piece.dtype != pool.dtype:
        raise ValueError(f"heads {head}…{head + heads - 1} in {piece.dtype} do not fit the pool")
    if count == 0:
        return
    size = heads * run
    _copy[(count, layers * values, triton.cdiv(size, RUN))](
        pool,
        piece,
        ids,
        size,
        head * run,
        values,
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        piece.stride(0),
        piece.stride(1),
        piece.stride(2),
        GATHER=gather,
        SIZE=RUN,
        num_warps=8,
    )


@triton.jit
def _copy(
    pool,
    piece,
    ids,
    size,
    offset,
    values,
    pool_block,
    pool_layer,
    pool_value,
    piece_block,
    piece_layer,
    piece_value,
    GATHER: tl.constexpr,
    SIZE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    layer = (tl.program_id(1) // values).to(tl.int64)
    value = tl.program_id(1) % values
    block = tl.load(ids + index).to(tl.int64)
    if block < 0:
        return
    at = tl.program_id(2) * SIZE + tl.arange(0, SIZE)
    inner = pool + block * pool_block + layer * pool_layer + value * pool_value + offset + at
    outer = piece + index * piece_block + layer * piece_layer + value * piece_value + at
    if GATHER:
        tl.store(outer, tl.load(inner, mask=at < size, other=0), mask=at < size)
    else:
        tl.store(inner, tl.load(outer, mask=at < size, other=0), mask=at < size)
