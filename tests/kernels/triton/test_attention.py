"""Attention kernels against plain attention in double, over pools of NaN and tables with holes."""

from __future__ import annotations

import pytest
import torch

from kernels.latent_attention import latent_attention
from kernels.paged_attention import PagedRows
from kernels.triton import split
from kernels.triton.decode_attention import decode_attention
from kernels.triton.latent_attention import latent_decode_attention
from kernels.triton.prefill_attention import prefill_attention
from tests.kernels.triton.cases import (
    DEVICE,
    EACH_DTYPE,
    Paged,
    assert_near,
    attention,
    integers,
    nan,
    random,
)

CONTEXTS = (16, 17, 0, 203, 1)
SHAPES = [
    (9, 3, 64, None, 3),
    (8, 1, 16, None, 1),
    (4, 2, 80, None, 2),
    (3, 3, 20, 50, 2),
    (4, 1, 64, 33, 1),
]
"""heads, KV heads, dim, window, splits"""


@EACH_DTYPE
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window", "splits"), SHAPES)
def test_decode(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None, splits: int
) -> None:
    """Among them a row of padding, which has no context and becomes zeros."""
    seen_from = [max(0, context - window) if window else 0 for context in CONTEXTS]
    paged = Paged(CONTEXTS, kv_heads, dim, dtype, seen_from=seen_from)
    queries = random(len(CONTEXTS), heads + 3, dim, dtype=dtype)[:, :heads]  # rows apart
    out = nan(len(CONTEXTS), heads, dim, dtype=dtype)
    starts = integers([(9, 9, context - 1) for context in CONTEXTS])[:, 2]
    returned = decode_attention(
        queries, paged.kv, paged.tables, starts, 203, 0.2, window=window, splits=splits, out=out
    )
    assert returned is out
    for row, context in enumerate(CONTEXTS):
        keys, values = paged.past[row].unbind(1)
        if context:
            wanted = attention(queries[row : row + 1], keys, values, [context - 1], 0.2, window)
        else:
            wanted = torch.zeros(1, heads, dim)
        assert_near(out[row : row + 1], wanted, dtype)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy, in the interpreter
def test_decode_without_rows_and_with_a_nan_query() -> None:
    paged = Paged((40, 40), 2, 32, torch.float32)
    queries = random(2, 4, 32)
    queries[0, 1, 3] = float("nan")
    starts = integers([39, 39])
    out = decode_attention(queries, paged.kv, paged.tables, starts, 40, 0.2)
    assert out[0, 1].isnan().all()
    assert out.isnan().sum() == 32
    none = decode_attention(queries[:0], paged.kv, paged.tables[:0], starts[:0], 1, 0.2)
    assert none.shape == (0, 4, 32)


def test_large_scores_stay_finite() -> None:
    paged = Paged((70,), 1, 64, torch.float32)
    queries = random(1, 2, 64) * 3000
    out = decode_attention(queries, paged.kv, paged.tables, integers([69]), 70, 1.0, splits=2)
    keys, values = paged.past[0].unbind(1)
    assert_near(out, attention(queries, keys, values, [69], 1.0), torch.float32)


@EACH_DTYPE
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), [case[:4] for case in SHAPES])
def test_prefill(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    """Chunks, single tokens and empty rows over prefixes, behind two tokens of other rows."""
    shapes = ((7, 0), (20, 13), (1, 203), (0, 5), (140, 40), (0, 0), (1, 0))
    seen_from = [max(0, start - window + 1) if window else 0 for _, start in shapes]
    contexts = [length + start for length, start in shapes]
    paged = Paged(contexts, kv_heads, dim, dtype, seen_from=seen_from)
    tokens = 2 + sum(length for length, _ in shapes)
    queries = random(tokens, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads]
    spans, first = [], 2
    for length, start in shapes:
        spans.append((first, length, start))
        first += length
    out = nan(tokens, heads, dim, dtype=dtype)
    prefill_attention(queries, paged.kv, paged.tables, integers(spans), 0.2, window=window, out=out)
    assert out[:2].isnan().all()
    for row, (first, length, start) in enumerate(spans):
        keys, values = paged.past[row].unbind(1)
        own = slice(first, first + length)
        positions = range(start, start + length)
        assert_near(out[own], attention(queries[own], keys, values, positions, 0.2, window), dtype)


def test_prefill_of_nothing() -> None:
    paged = Paged((5,), 1, 16, torch.float32)
    queries = random(3, 2, 16)
    for rows in (0, 1):
        spans = integers([(0, 0, 5)])[:rows]
        out = prefill_attention(queries, paged.kv, paged.tables[:rows], spans, 0.2)
        assert out.isnan().all()


@EACH_DTYPE
@pytest.mark.parametrize(
    ("heads", "rank", "rope", "splits"), [(16, 64, 16, 1), (5, 48, 12, 3), (70, 32, 16, 2)]
)
def test_latent_decode(dtype: torch.dtype, heads: int, rank: int, rope: int, splits: int) -> None:
    paged = Paged(CONTEXTS, 1, rank + rope, dtype, values=1)
    latents = paged.kv[:, 0, 0]
    queries = random(len(CONTEXTS), heads, rank + rope, dtype=dtype)
    starts = integers([context - 1 for context in CONTEXTS])
    out = latent_decode_attention(
        queries, latents, paged.tables, starts, 203, 0.2, rank=rank, splits=splits
    )
    rows = PagedRows(
        starts=tuple(max(context - 1, 0) for context in CONTEXTS),
        lengths=tuple(min(context, 1) for context in CONTEXTS),
        decode=0,
        tables=paged.tables,
        slots=starts,
        spans=starts,
    )
    present = torch.tensor([context > 0 for context in CONTEXTS], device=DEVICE)
    reference = torch.zeros_like(out)
    reference[present] = latent_attention(queries[present], latents, rows, 0.2, rank)
    for row, context in enumerate(CONTEXTS):
        wanted = torch.zeros(1, heads, rank)
        if context:
            known = paged.past[row][:, 0]
            query = queries[row : row + 1]
            wanted = attention(query, known, known[..., :rank], [context - 1], 0.2)
        assert_near(out[row : row + 1], wanted, dtype)
        assert_near(reference[row : row + 1], wanted, dtype)


def test_the_latent_reference_is_causal() -> None:
    paged = Paged((40,), 1, 20, torch.float32, values=1)
    queries = random(9, 3, 20)
    rows = PagedRows(
        starts=(31,), lengths=(9,), decode=0, tables=paged.tables, slots=queries, spans=queries
    )
    known = paged.past[0][:, 0]
    ours = latent_attention(queries, paged.kv[:, 0, 0], rows, 0.3, 12)
    wanted = attention(queries, known, known[..., :12], range(31, 40), 0.3)
    assert_near(ours, wanted, torch.float32)


def test_parts_follow_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs as keep it busy, none shorter than its reduction is worth."""
    monkeypatch.setattr(split, "processors", lambda _: 132)
    device = torch.device("cuda")
    assert split.parts(1, 8192, device) == 32
    assert split.parts(64 * 8, 8192, device) == 3
    assert split.parts(4096, 8192, device) == 1
    assert split.parts(1, 1, device) == 1
    assert split.parts(0, 0, device) == 1
