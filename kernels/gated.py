"""Gated activation of a fused gate-and-up projection: silu(gate) · up."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [tokens, 2·width], gate first; result [tokens, width]."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate).mul_(up)
