"""RMSNorm, alone or with the residual added first: y = x / sqrt(mean(x²) + eps) · weight.

One program a token keeps its row in registers between the mean and the product. The sum with the
residual is rounded to the residual's dtype before it is normed, as the reference does.

Bytes: 2 · tokens · hidden · element, twice that with the residual: memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [tokens, hidden], rows may be apart, weight [hidden]; result in the dtype of `x`."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` into `residual` in place and return the norm of the sum; `x` stays."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    tokens, hidden = x.shape
    if x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("rows must be contiguous")
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    width = triton.next_power_of_2(hidden)
    _norm[(tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        hidden,
        eps,
        ADD=residual is not None,
        WIDTH=width,
        num_warps=min(16, max(1, width // 512)),
    )
    return out


@triton.jit
def _norm(
    x,
    residual,
    weight,
    out,
    x_token,
    residual_token,
    hidden,
    eps,
    ADD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < hidden
    value = tl.load(x + token * x_token + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        place = residual + token * residual_token + at
        value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / hidden + eps)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + token * hidden + at, (value * scale * factor).to(out.dtype.element_ty), mask=inside
    )
