"""RMSNorm: y = x / sqrt(mean(x²) + eps) · weight, with the mean in fp32.

Bound: reads and writes each element once; memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [tokens, hidden], weight [hidden]; result in the dtype of `x`."""
    if x.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `x` into `residual` in place and return the norm of the sum."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)
