"""One product a group of rows, each with its own weight: the experts of a mixture."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def grouped_matmul(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """x [tokens, in], sorted by expert; weights [experts, out, in]; offsets [experts + 1] int32.

    Rows offsets[e] up to offsets[e + 1] are multiplied with weights[e]ᵀ; offsets[0] = 0 and
    offsets[-1] = tokens. Result [tokens, out] in the dtype of `x`.
    """
    out = x.new_empty((x.shape[0], weights.shape[1]))
    bounds = offsets.tolist()
    for expert, (first, last) in enumerate(itertools.pairwise(bounds)):
        torch.matmul(x[first:last], weights[expert].T, out=out[first:last])
    return out
