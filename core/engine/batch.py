"""Plan to tensors: one forward batch from the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.engine.plan import Row
from core.models.decoder import ForwardBatch
from core.types import BLOCK_TOKENS
from kernels.paged_attention import PagedRows


def order(rows: Sequence[Row]) -> list[Row]:
    """Rows of one token first, as the kernels want them."""
    return sorted(rows, key=lambda row: len(row.token_ids) > 1)


def build(rows: Sequence[Row], group: int = 0) -> ForwardBatch:
    """`rows` as `order` gives them; `group` is the KV group whose block tables are used."""
    lengths = [len(row.token_ids) for row in rows]
    starts = [row.start for row in rows]
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled: list[int] = []
    spans: list[tuple[int, int, int]] = []
    longest = max(len(row.block_tables[group]) for row in rows)
    tables: list[list[int]] = []
    for row in rows:
        table = row.block_tables[group]
        spans.append((len(tokens), len(row.token_ids), row.start))
        own = range(row.start, row.start + len(row.token_ids))
        tokens.extend(row.token_ids)
        positions.extend(own)
        slots.extend(table[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for at in own)
        tables.append([*table, *(0,) * (longest - len(table))])
        if row.sample is not None:
            sampled.append(len(tokens) - 1)
    return ForwardBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        rows=PagedRows(
            starts=tuple(starts),
            lengths=tuple(lengths),
            decode=sum(length == 1 for length in lengths),
            tables=torch.tensor(tables, dtype=torch.int32),
            slots=torch.tensor(slots, dtype=torch.int64),
            spans=torch.tensor(spans, dtype=torch.int32),
        ),
        sampled=torch.tensor(sampled, dtype=torch.int64),
    )
