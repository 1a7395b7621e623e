"""The experts' product against each expert's own, for all kinds of counts."""

from __future__ import annotations

import pytest
import torch

from kernels import grouped_matmul as reference
from kernels.triton.grouped_matmul import grouped_matmul
from tests.kernels.triton.cases import EACH_DTYPE, assert_near, integers, random

COUNTS = [(3, 0, 0, 41, 1, 0, 16), (0, 0, 200), (5,), (0, 17, 0), (1, 1, 1, 1), (0, 0)]


@EACH_DTYPE
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("depth", "width"), [(64, 128), (75, 150)])
def test_each_row_meets_its_expert(
    dtype: torch.dtype, counts: tuple[int, ...], depth: int, width: int
) -> None:
    x = random(sum(counts), depth + 1, dtype=dtype)[:, :depth]
    weights = random(len(counts), width, depth, dtype=dtype, seed=1) / 8
    bounds = [sum(counts[:expert]) for expert in range(len(counts) + 1)]
    ours = grouped_matmul(x, weights, integers(bounds))
    theirs = reference.grouped_matmul(x, weights, integers(bounds))
    for expert in range(len(counts)):
        own = slice(bounds[expert], bounds[expert + 1])
        wanted = x[own].double() @ weights[expert].double().T
        assert_near(ours[own], wanted, dtype)
        assert_near(theirs[own], wanted, dtype)
