"""Plan to tensors: one forward batch from the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.engine.plan import Row
from core.models.decoder import ForwardBatch
from core.types import BLOCK_TOKENS
from kernels.paged_attention import PagedRows


def order(rows: Sequence[Row]) -> list[Row]:
    """Rows of one token first, as the kernels want them."""
    return sorted(rows, key=lambda row: len(row.token_ids) > 1)


def build(rows: Sequence[Row]) -> ForwardBatch:
    """`rows` as `order` gives them, all with the same KV groups. Sampled are the last token of
    each row that samples, and one more position for each of its drafts."""
    tokens: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    spans: list[tuple[int, int, int]] = []
    for row in rows:
        spans.append((len(tokens), len(row.token_ids), row.start))
        tokens.extend(row.token_ids)
        positions.extend(range(row.start, row.start + len(row.token_ids)))
        if row.sample is not None:
            sampled.extend(range(len(tokens) - 1 - row.drafts, len(tokens)))
    shared = torch.tensor(spans, dtype=torch.int32)
    return ForwardBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        groups=tuple(_group(rows, group, shared) for group in range(len(rows[0].block_tables))),
        sampled=torch.tensor(sampled, dtype=torch.int64),
    )


def _group(rows: Sequence[Row], group: int, spans: Tensor) -> PagedRows:
    longest = max(len(row.block_tables[group]) for row in rows)
    slots: list[int] = []
    tables: list[tuple[int, ...]] = []
    for row in rows:
        table = row.block_tables[group]
        end = row.start + len(row.token_ids)
        slots.extend(
            table[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
            for at in range(row.start, end)
        )
        tables.append(table + (0,) * (longest - len(table)))
    return PagedRows(
        starts=tuple(row.start for row in rows),
        lengths=tuple(len(row.token_ids) for row in rows),
        decode=sum(len(row.token_ids) == 1 for row in rows),
        tables=torch.tensor(tables, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int64),
        spans=spans,
    )
