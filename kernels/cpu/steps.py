"""Layers that native code has no single call for, step by step on its operations: norms of single
heads, mixtures of experts, latents, partial sums that must be reduced in between."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.experts import Sorted, joined
from kernels.layers import HeadAttention, Layer, Shape
from kernels.linear import Linear
from kernels.paged_attention import PagedRows
from kernels.rms_norm import rms_norm
from kernels.stepwise import Places, TorchLayers

if TYPE_CHECKING:
    from kernels.cpu.native import NativeOps


class NativeSteps(TorchLayers):
    """Activations are fp32, KV in the dtype of the pool."""

    def __init__(self, ops: NativeOps, layers: Sequence[Layer], shape: Shape) -> None:
        super().__init__(layers, shape)
        self._ops = ops

    def _norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._ops.rms_norm(x.contiguous(), weight, eps)

    def _add_norm(self, update: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._ops.rms_norm(residual.add_(update), weight, eps)

    def _gated(self, x: Tensor) -> Tensor:
        return self._ops.silu_mul(x)

    def _attend(
        self, qkv: Tensor, kv: Tensor, rows: PagedRows, places: Places, attention: HeadAttention
    ) -> Tensor:
        shape = self._shape
        if attention.query_norm is not None and attention.key_norm is not None:
            queries, keys = qkv[:, : shape.heads], qkv[:, shape.heads : -shape.kv_heads]
            queries.copy_(rms_norm(queries, attention.query_norm, shape.norm_eps))
            keys.copy_(rms_norm(keys, attention.key_norm, shape.norm_eps))
        return self._ops.attention(
            qkv, kv, rows, places.positions, shape.inverse_frequencies, attention.window,
            shape.scale,
        )  # fmt: skip


class StoredExperts:
    """`kernels.experts.Experts` over stored bytes: two products an expert."""

    def __init__(self, ops: NativeOps, experts: Sequence[tuple[Linear, Linear]]) -> None:
        self._ops = ops
        self._experts = tuple(experts)

    @property
    def count(self) -> int:
        return len(self._experts)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        pairs = Sorted.of(ids, self.count)
        taken = x[pairs.order // ids.shape[1]]
        mixed = torch.empty_like(taken)
        for expert, (first, last) in enumerate(itertools.pairwise(pairs.offsets.tolist())):
            if first < last:
                gate_up, down = self._experts[expert]
                mixed[first:last] = down(self._ops.silu_mul(gate_up(taken[first:last])))
        return joined(mixed, pairs.order, weights)
