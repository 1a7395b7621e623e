"""Attention over a compressed KV (multi-head latent attention), in its absorbed form.

All heads share one cached vector a token: c [rank] and a rotated key part [rope]. With the key's
up-projection folded into the query and the value's into what follows, out[h] =
softmax((q[h] · [c, k_rope]ᵀ) · scale) · c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.paged_attention import QUERY_TILE, PagedRows


def latent_attention(
    queries: Tensor, latents: Tensor, rows: PagedRows, scale: float, rank: int
) -> Tensor:
    """queries [tokens, heads, rank + rope], absorbed → [tokens, heads, rank].

    latents [blocks, block_tokens, rank + rope], strided: one layer of the pool without its k/v and
    head axes. The latents of the new tokens must be in place; token i of a row sees what precedes
    it and itself.
    """
    tokens, heads, _ = queries.shape
    out = queries.new_empty((tokens, heads, rank))
    first = 0
    for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
        blocks = -(-(start + length) // latents.shape[1])
        known = latents[rows.tables[row, :blocks].long()].flatten(0, 1).to(queries.dtype)
        for at in range(0, length, QUERY_TILE):
            size = min(QUERY_TILE, length - at)
            tile = slice(first + at, first + at + size)
            out[tile] = _tile(queries[tile] * scale, known, start + at, rank)
        first += length
    return out


def _tile(queries: Tensor, known: Tensor, start: int, rank: int) -> Tensor:
    """Neighbouring tokens of one sequence, the first of which has position `start`."""
    context = start + queries.shape[0]
    known = known[:context]
    scores = torch.matmul(queries, known.T)
    position = torch.arange(start, context, device=queries.device)[:, None]
    future = torch.arange(context, device=queries.device) > position
    scores.masked_fill_(future[:, None], float("-inf"))
    return torch.matmul(scores.softmax(-1), known[:, :rank])
