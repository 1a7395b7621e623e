"""Gated activation of a fused gate-and-up projection: silu(gate) · up, silu(x) = x / (1 + e^−x).

Bytes: 3 · tokens · width · element: memory. One rounding, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RUN = 2048
"""Elements of a row a program computes."""


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [tokens, 2·width], gate first, rows may be apart; result [tokens, width]."""
    tokens, both = gate_up.shape
    if gate_up.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    width = both // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if tokens == 0:
        return out
    size = min(RUN, triton.next_power_of_2(width))
    _silu_mul[(tokens, triton.cdiv(width, size))](
        gate_up, out, gate_up.stride(0), width, SIZE=size, num_warps=4
    )
    return out


@triton.jit
def _silu_mul(gate_up, out, token_stride, width, SIZE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = at < width
    place = gate_up + token * token_stride + at
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
    mixed = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * width + at, mixed.to(out.dtype.element_ty), mask=inside)
