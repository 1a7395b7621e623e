"""What launches of the attention kernels over paged keys and values have in common."""

from __future__ import annotations

import math

import triton
from torch import Tensor


def check(queries: Tensor, kv: Tensor, *rows: Tensor) -> None:
    """Raises ValueError unless the last axis of each lies together."""
    if any(one.stride(-1) != 1 for one in (queries, kv, *rows)):
        raise ValueError("queries, KV and what names rows need a contiguous last axis")


def numbers(
    queries: Tensor, kv: Tensor, tables: Tensor, rows: Tensor, scale: float, window: int | None
) -> tuple[float | int, ...]:
    """In the order in which the kernels take them: the scale for scores in base 2, the window (0:
    none), strides of queries (row, head), KV (block, value, head, token), tables and `rows`."""
    return (
        scale * math.log2(math.e),
        window or 0,
        *queries.stride()[:2],
        *kv.stride()[:4],
        tables.stride(0),
        rows.stride(0),
    )


def constants(queries: Tensor, kv: Tensor, window: int | None) -> dict[str, int]:
    """Of the kernels: query heads of a KV head, a head's dim as it is and padded, tokens of a
    block, whether there is a window."""
    _, _, kv_heads, block_tokens, dim = kv.shape
    return {
        "GROUP": queries.shape[1] // kv_heads,
        "DIM": dim,
        "DIM_PAD": padded(dim),
        "BLOCK": block_tokens,
        "WINDOWED": window is not None,
    }


def padded(size: int) -> int:
    """As matrix products want it."""
    return max(16, int(triton.next_power_of_2(size)))
