"""Attention over a compressed KV (multi-head latent attention), in its two forms.

All heads share one cached vector a token: c [rank] and a rotated key part [rope]. Absorbed, with
the key's up-projection folded into the query and the value's into what follows, out[h] =
softmax((q[h] · [c, k_rope]ᵀ) · scale) · c. Expanded, keys and values of each head are made from the
latents first. The absorbed form multiplies by vectors of 2 · rank + rope for each pair of a query
and a token that it sees, the expanded one by vectors of nope + rope + value, after having paid for
each token once: it is better for long chunks of a prompt, never for single tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.paged_attention import QUERY_TILE, PagedRows

EXPANDED = 1 << 24
"""Most numbers of keys and values that are made at once: some heads after the other."""


def expands(length: int, context: int, key_up: Tensor, value: int, rope: int) -> bool:
    """Does the expanded form take less for `length` tokens that see `context`, their own included?
    key_up [heads, nope, rank], `value` of a head. By multiplications of a head."""
    _, nope, rank = key_up.shape
    pairs = length * context
    absorbed = length * rank * (nope + value) + pairs * (2 * rank + rope)
    expanded = context * rank * (nope + value) + pairs * (nope + rope + value)
    return length > 1 and expanded < absorbed


def expanded_attention(
    queries: Tensor,
    latents: Tensor,
    rows: PagedRows,
    scale: float,
    key_up: Tensor,
    value_up: Tensor,
) -> Tensor:
    """queries [tokens, heads, nope + rope], as they are → [tokens, heads, value].

    key_up [heads, nope, rank], value_up [heads, value, rank]; latents and rows as below.
    """
    tokens, heads, _ = queries.shape
    _, nope, rank = key_up.shape
    value = value_up.shape[1]
    out = queries.new_empty((tokens, heads, value))
    first = 0
    for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
        context = start + length
        blocks = -(-context // latents.shape[1])
        known = latents[rows.tables[row, :blocks].long()].flatten(0, 1)[:context].to(queries.dtype)
        step = max(1, EXPANDED // (context * (nope + value)))
        for head in range(0, heads, step):
            some = slice(head, head + step)
            keys = torch.matmul(key_up[some], known[:, :rank].T)
            values = torch.matmul(known[:, :rank], value_up[some].transpose(1, 2))
            for at in range(0, length, QUERY_TILE):
                tile = slice(first + at, first + min(at + QUERY_TILE, length))
                own = queries[tile, some].transpose(0, 1) * scale
                seen = start + at + own.shape[1]
                scores = torch.matmul(own[..., :nope], keys[..., :seen])
                scores += torch.matmul(own[..., nope:], known[:seen, rank:].T)
                scores.masked_fill_(_future(start + at, seen, queries.device), float("-inf"))
                mixed = torch.matmul(scores.softmax(-1), values[:, :seen])
                out[tile, some] = mixed.transpose(0, 1)
        first += length
    return out


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
    scores.masked_fill_(_future(start, context, queries.device)[:, None], float("-inf"))
    return torch.matmul(scores.softmax(-1), known[:, :rank])


def _future(start: int, context: int, device: torch.device) -> Tensor:
    """[context − start, context]: what the tokens from `start` on must not see."""
    position = torch.arange(start, context, device=device)[:, None]
    return torch.arange(context, device=device) > position
