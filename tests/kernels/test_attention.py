"""Attention over paged KV against a plain definition, on ragged shapes, in all implementations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.cpu.native import NativeOps
from kernels.layers import HeadAttention
from kernels.linear import Dense
from kernels.paged_attention import PagedRows
from kernels.rotary import angles
from kernels.stepwise import Places, attend
from tests.kernels.test_ops import DTYPES, IMPLEMENTATIONS, assert_near, make, random


def attended(
    name: str, qkv: Tensor, kv: Tensor, rows: PagedRows, positions: Tensor, window: int | None
) -> Tensor:
    chosen = make(name, kv.dtype)
    frequencies = _frequencies(qkv.shape[-1])
    if isinstance(chosen, NativeOps):
        return chosen.attention(qkv.float(), kv, rows, positions, frequencies, window)
    places = Places(positions, *angles(positions, frequencies))
    product = Dense(torch.empty(0, 0))
    attention = HeadAttention(product, product, window=window)
    return attend(qkv, kv, rows, places, attention, scale=qkv.shape[-1] ** -0.5, eps=0.0)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(9, 3, 64), (8, 8, 16), (8, 1, 64), (10, 2, 128), (6, 2, 20)],
)
def test_attention_over_pages(
    name: str, dtype: torch.dtype, window: int | None, heads: int, kv_heads: int, dim: int
) -> None:
    """Decode rows and prompt chunks of ragged contexts, in a pool full of NaN with holes."""
    shapes = [(1, 0), (1, 15), (1, 16), (1, 333), (1, 31), (7, 0), (20, 13), (300, 40)]
    block_tokens = 16
    order = torch.randperm(63, generator=torch.Generator().manual_seed(1)).int() + 1
    pool = torch.full((64, 2, 2, kv_heads, block_tokens, dim), float("nan"), dtype=dtype)
    kv = pool[:, 1]
    tables = torch.full((len(shapes), 30), 2**30, dtype=torch.int32)  # padding names no block
    qkv = random(sum(new for new, _ in shapes), heads + 2 * kv_heads, dim, dtype=dtype)
    spans, slots, expected, first, taken = [], [], [], 0, 0
    positions: list[int] = []
    for row, (new, before) in enumerate(shapes):
        count = -(-(new + before) // block_tokens)
        tables[row, :count] = order[taken : taken + count]
        taken += count
        past = random(before, 2, kv_heads, dim, dtype=dtype, seed=row)
        gone = max(0, before - window + 1) if window else 0
        for at in range(gone, before):
            kv[tables[row, at // block_tokens], :, :, at % block_tokens] = past[at]
        own = range(before, before + new)
        slots += [int(tables[row, at // block_tokens]) * block_tokens + at % 16 for at in own]
        tables[row, : gone // block_tokens] = 0  # what the window has passed: not read
        part = qkv[first : first + new]
        expected.append(_defined(part, past, before, heads, kv_heads, window))
        spans.append((first, new, before))
        positions += own
        first += new
    rows = PagedRows(
        starts=tuple(before for _, before in shapes),
        lengths=tuple(new for new, _ in shapes),
        decode=5,
        tables=tables,
        slots=torch.tensor(slots),
        spans=torch.tensor(spans, dtype=torch.int32),
    )
    ours = attended(name, qkv.clone(), kv, rows, torch.tensor(positions), window)
    assert_near(ours, torch.cat(expected), dtype)
    assert pool[:, 0].isnan().all()


def _frequencies(dim: int) -> Tensor:
    return torch.tensor([100.0 ** (-2 * i / dim) for i in range(dim // 2)])


def _defined(
    qkv: Tensor, past: Tensor, before: int, heads: int, kv_heads: int, window: int | None
) -> Tensor:
    """Attention in double, without folding or pages; new keys are rounded as the pool does."""
    dim, new = qkv.shape[-1], qkv.shape[0]
    positions = torch.arange(before, before + new).double()[:, None, None]
    angle = positions * _frequencies(dim).double()
    a, b = qkv[:, : heads + kv_heads].double().chunk(2, -1)
    both = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
    turned = both.to(qkv.dtype).double()
    group = heads // kv_heads
    keys = torch.cat((past[:, 0].double(), turned[:, heads:])).repeat_interleave(group, 1)
    values = torch.cat((past[:, 1], qkv[:, heads + kv_heads :])).double()
    scores = torch.einsum("nhd,thd->nht", turned[:, :heads], keys) / math.sqrt(dim)
    at, own = torch.arange(before + new), torch.arange(before, before + new)[:, None]
    hidden = (at > own) | (at <= own - (window or before + new))
    scores.masked_fill_(hidden[:, None], float("-inf"))
    shares = scores.softmax(-1)
    mixed = torch.einsum("nht,thd->nhd", shares, values.repeat_interleave(group, 1))
    return mixed.reshape(new, heads * dim)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_large_and_poisoned_scores(name: str, dtype: torch.dtype) -> None:
    """Scores of ±10⁴ stay finite; a NaN query stays in its own row."""
    pool = torch.zeros(4, 2, 1, 16, 64, dtype=dtype)
    qkv = (random(2, 3, 64) * 300).to(dtype)
    qkv[1, 0, 5] = float("nan")
    rows = PagedRows(
        starts=(0, 0),
        lengths=(1, 1),
        decode=2,
        tables=torch.tensor([[3], [1]], dtype=torch.int32),
        slots=torch.tensor([48, 16]),
        spans=torch.tensor([[0, 1, 0], [1, 1, 0]], dtype=torch.int32),
    )
    out = attended(name, qkv.clone(), pool, rows, torch.tensor([0, 0]), None)
    assert_near(out[0], qkv[0, 2], dtype)
    assert out[1].isnan().all()
