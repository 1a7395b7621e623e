"""Rotary position embedding, half-split form: pairs are (i, i + dim/2) of a head.

(a, b) → (a·cos − b·sin, b·cos + a·sin), angle = position · inverse frequency, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def angles(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [tokens, dim/2] in fp32 for `positions` [tokens]."""
    angle = torch.outer(positions.float(), inverse_frequencies)
    return angle.cos(), angle.sin()


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, dim]; result in the dtype of `x`."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
