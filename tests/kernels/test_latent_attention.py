"""The two forms of attention over latents are one; which is taken is a matter of lengths."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import latent_attention as module
from kernels.latent_attention import expanded_attention, expands, latent_attention
from kernels.layers import LatentAttention, Shape
from kernels.linear import Dense
from kernels.paged_attention import PagedRows
from kernels.stepwise import TorchLayers

HEADS, NOPE, ROPE, VALUE, RANK, BLOCK = 3, 16, 8, 12, 32, 16
SHAPES = [(1, 40), (1, 0), (150, 30), (5, 90), (70, 0)]
"""New tokens of each row, and those before them; the first two decode."""


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ups() -> tuple[Tensor, Tensor]:
    return random(HEADS, NOPE, RANK, seed=1) / RANK**0.5, random(HEADS, VALUE, RANK, seed=2)


def paged() -> tuple[PagedRows, Tensor]:
    """Blocks without order, holes behind each context, NaN wherever nothing was written."""
    counts = [-(-(new + old) // BLOCK) for new, old in SHAPES]
    tables = torch.full((len(SHAPES), max(counts) + 1), 2**30, dtype=torch.int32)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).int()
    pool = torch.full((sum(counts), BLOCK, RANK + ROPE), float("nan"))
    taken, slots = 0, []
    for row, (new, old) in enumerate(SHAPES):
        tables[row, : counts[row]] = order[taken : taken + counts[row]]
        taken += counts[row]
        for at in range(new + old):
            block = int(tables[row, at // BLOCK])
            pool[block, at % BLOCK] = random(RANK + ROPE, seed=1000 * row + at)
            if at >= old:
                slots.append(block * BLOCK + at % BLOCK)
    lengths = [new for new, _ in SHAPES]
    firsts = [0, *accumulate(lengths)][:-1]
    spans = [(first, new, old) for first, (new, old) in zip(firsts, SHAPES, strict=True)]
    rows = PagedRows(
        starts=tuple(old for _, old in SHAPES),
        lengths=tuple(lengths),
        decode=2,
        tables=tables,
        slots=torch.tensor(slots),
        spans=torch.tensor(spans, dtype=torch.int32),
    )
    return rows, pool


def absorbed(queries: Tensor, rows: PagedRows, pool: Tensor) -> Tensor:
    key_up, value_up = ups()
    folded = torch.einsum("thn,hnr->thr", queries[..., :NOPE], key_up)
    mixed = latent_attention(torch.cat((folded, queries[..., NOPE:]), -1), pool, rows, 0.2, RANK)
    return torch.einsum("thr,hvr->thv", mixed, value_up)


@pytest.mark.parametrize("at_once", [1 << 24, 1])
def test_expanded_is_absorbed(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads at once, and one after the other."""
    monkeypatch.setattr(module, "EXPANDED", at_once)
    rows, pool = paged()
    queries = random(sum(rows.lengths), HEADS, NOPE + ROPE, seed=9)
    found = expanded_attention(queries, pool, rows, 0.2, *ups())
    torch.testing.assert_close(found, absorbed(queries, rows, pool), atol=1e-4, rtol=0)


def test_long_chunks_are_expanded_and_single_tokens_never() -> None:
    deepseek = torch.empty(1, 128, 512)  # of DeepSeek-V3: nope 128, rank 512
    sizes = ((1, 1), (1, 8192), (16, 8192), (160, 8192), (200, 8192), (512, 512), (8192, 8192))
    taken = [expands(new, context, deepseek, 128, 64) for new, context in sizes]
    assert taken == [False, False, False, False, True, True, True]


def test_a_step_of_both_kinds_is_the_same_as_either() -> None:
    """Decode rows, a chunk that is expanded, one that is not, another one that is."""
    rows, pool = paged()
    key_up, value_up = ups()
    nothing = Dense(torch.empty(0, 0))
    attention = LatentAttention(
        query_down=None, query_norm=None, query_up=nothing, kv_down=nothing,
        kv_norm=torch.ones(RANK), key_up=key_up, value_up=value_up, output=nothing, scale=0.2,
        rotary_scale=1.0, norm_eps=1e-6,
    )  # fmt: skip
    assert TorchLayers._expanded(rows, attention, ROPE) == [False, False, True, False, True]
    queries = random(sum(rows.lengths), HEADS, NOPE + ROPE, seed=9)
    taken: list[str] = []

    class Noting(TorchLayers):
        def _mix_absorbed(self, *given: Any) -> Tensor:
            taken.append("absorbed")
            return super()._mix_absorbed(*given)

        def _mix_expanded(self, *given: Any) -> Tensor:
            taken.append("expanded")
            return super()._mix_expanded(*given)

    shape = Shape(1, HEADS, 1, NOPE, 1e-6, 0.2, torch.ones(ROPE // 2))
    found = Noting((), shape)._mixed(
        (queries[..., :NOPE], queries[..., NOPE:]), attention, pool, rows
    )
    torch.testing.assert_close(found, absorbed(queries, rows, pool), atol=1e-4, rtol=0)
    assert taken == ["absorbed", "expanded", "absorbed", "expanded"]
