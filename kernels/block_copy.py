"""Gather blocks of the pool into one piece for a transfer, and scatter a received piece.

A piece has the pool's order, [n, layer, k/v, head, token, dim], for the heads that both sides
share: their ranges may begin at different heads.
"""

from __future__ import annotations

from torch import Tensor


def gather_blocks(pool: Tensor, ids: Tensor, piece: Tensor, head: int = 0) -> None:
    """piece [n, layers, k/v, heads, block_tokens, dim] ← blocks `ids` [n] of `pool`, from `head`.

    A negative id leaves its part alone.
    """
    wanted = ids >= 0
    piece[wanted] = pool[ids[wanted], :, :, head : head + piece.shape[3]]


def scatter_blocks(piece: Tensor, ids: Tensor, pool: Tensor, head: int = 0) -> None:
    """The way back: `piece` → blocks `ids`, all different, of `pool`, heads from `head` on."""
    wanted = ids >= 0
    pool[ids[wanted], :, :, head : head + piece.shape[3]] = piece[wanted]
