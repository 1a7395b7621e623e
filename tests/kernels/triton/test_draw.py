"""The search for a drawn token against a sort of the whole row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.draw import draw_by_sorting
from kernels.triton.draw import draw
from tests.kernels.triton.cases import DEVICE, random

SETTINGS = [
    # temperature, top-k, top-p, min-p, uniform number
    (1.0, 0, 1.0, 0.0, 0.999),
    (30.0, 0, 1.0, 0.0, 0.5),
    (1.0, 700, 0.98, 0.0, 0.97),
    (3.0, 0, 0.6, 1e-4, 0.83),
    (0.7, 5, 1.0, 0.0, 0.0),
    (1e-20, 0, 0.9, 0.0, 0.4),
    (2.0, 5000, 1.0, 0.2, 0.99999),
]


def given() -> Tensor:
    return torch.tensor(SETTINGS, dtype=torch.float64, device=DEVICE)


def rows(vocabulary: int, kind: str) -> Tensor:
    wide = random(len(SETTINGS), vocabulary + 3) * 4
    if kind == "coarse":
        wide = wide.round()  # many equals, of both zeros
        wide[:, ::7] = -0.0
    elif kind == "flat":
        wide = torch.zeros_like(wide)
    wide[:, vocabulary:] = float("nan")
    return wide[:, :vocabulary]


@pytest.mark.parametrize(
    ("vocabulary", "kind", "some"),
    [(900, "fine", (2, 3)), (2500, "coarse", (1, 4)), (301, "flat", (0, 6)), (3, "fine", (5,))],
)
def test_the_same_token_as_by_sorting(vocabulary: int, kind: str, some: tuple[int, ...]) -> None:
    logits = rows(vocabulary, kind)
    wanted = torch.zeros(len(SETTINGS), dtype=torch.bool, device=DEVICE)
    wanted[list(some)] = True
    found = torch.full((len(SETTINGS),), -7, dtype=torch.int64, device=DEVICE)
    expected = found.clone()
    draw(logits, given(), wanted, found)
    draw_by_sorting(logits, given(), wanted, expected)
    assert found.tolist() == expected.tolist()


def test_rows_that_are_decided_are_left_alone() -> None:
    logits = rows(300, "fine")
    wanted = torch.zeros(len(SETTINGS), dtype=torch.bool, device=DEVICE)
    wanted[2] = True
    found = torch.full((len(SETTINGS),), -7, dtype=torch.int64, device=DEVICE)
    draw(logits, given(), wanted, found)
    assert (found >= 0).nonzero().flatten().tolist() == [2]
    assert found[2] < 300
