"""Where kernels are tried, how near they must come, and pools that punish a wrong read."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is there for Linux on x86-64 only")
import triton

assert "TRITON_INTERPRET" in os.environ, "tests/conftest.py sets it before triton is imported"
INTERPRETED: bool = triton.knobs.runtime.interpret
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("compiled kernels need a CUDA device", allow_module_level=True)
DEVICE = "cpu" if INTERPRETED else "cuda"

DTYPES = [torch.float32, torch.float16]
if not INTERPRETED:  # tl.dot on bf16 is wrong in the interpreter
    DTYPES.append(torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
HOLE = 2**30
"""In a block table: to follow it leaves the pool by terabytes."""
BLOCK = 16


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def nan(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def integers(values: Sequence[object], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def assert_near(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        ours.double().cpu(), expected.double().cpu(), atol=tolerance, rtol=tolerance
    )


class Paged:
    """The KV of some contexts in the middle layer of a pool whose every other number is NaN.

    `past[row]` [context, values, kv_heads, dim]. Entries of a table behind the context, and those
    wholly before `seen_from[row]`, are holes.
    """

    def __init__(
        self,
        contexts: Sequence[int],
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        *,
        values: int = 2,
        seen_from: Sequence[int] | None = None,
    ) -> None:
        counts = [-(-context // BLOCK) for context in contexts]
        blocks = sum(counts) + 3
        self.pool = nan(blocks, 3, values, kv_heads, BLOCK, dim, dtype=dtype)
        self.kv = self.pool[:, 1]
        self.tables = torch.full((len(contexts), max(counts) + 2), HOLE, dtype=torch.int32)
        self.past = [
            random(context, values, kv_heads, dim, dtype=dtype, seed=100 + row)
            for row, context in enumerate(contexts)
        ]
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(7)).tolist()
        for row, context in enumerate(contexts):
            first = 0 if seen_from is None else seen_from[row]
            for at in range(first // BLOCK, counts[row]):
                block = order.pop()
                self.tables[row, at] = block
                piece = self.past[row][max(at * BLOCK, first) : min((at + 1) * BLOCK, context)]
                begin = max(first - at * BLOCK, 0)
                self.kv[block, :, :, begin : begin + len(piece)] = piece.permute(1, 2, 0, 3)
        self.tables = self.tables.to(DEVICE)

    def untouched(self) -> bool:
        return bool(self.pool[:, ::2].isnan().all())


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Sequence[int],
    scale: float,
    window: int | None = None,
) -> Tensor:
    """In double: queries [n, heads, dim] at `positions` over keys, values [tokens, kv_heads, …]."""
    group = queries.shape[1] // keys.shape[1]
    wide = keys.double().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,thd->nht", queries.double(), wide) * scale
    own = torch.tensor(positions, device=queries.device)[:, None, None]
    at = torch.arange(keys.shape[0], device=queries.device)
    hidden = at > own
    if window is not None:
        hidden = hidden | (at <= own - window)
    shares = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("nht,thd->nhd", shares, values.double().repeat_interleave(group, 1))
