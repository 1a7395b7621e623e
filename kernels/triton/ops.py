"""Decoder layers from the Triton kernels; matrix products stay PyTorch's (cuBLAS)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.layers import Layer, Layers, Shape, TorchLayers
from kernels.linear import Dense, DenseEmbedding, Embedding, Linear, Stored, decoded
from kernels.paged_attention import PagedRows
from kernels.triton.decode_attention import decode_attention
from kernels.triton.gated import silu_mul
from kernels.triton.kv_write import write_kv
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.rms_norm import add_rms_norm, rms_norm
from kernels.triton.rotary import rotate


class TritonOps:
    """`kernels.ops.Ops` on `device`: weights are decoded on the host and moved there once."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cuda") -> None:
        self.dtype = dtype
        self._device = torch.device(device)
        self._tables: dict[int, tuple[Stored, Tensor]] = {}

    def vector(self, stored: Stored) -> Tensor:
        return self._decoded([stored])[0]

    def linear(self, parts: Sequence[Stored], bias: Tensor | None) -> Linear:
        if len(parts) == 1 and id(parts[0]) in self._tables:  # a head tied to the embedding
            return Dense(self._tables[id(parts[0])][1], bias)
        return Dense(self._decoded(parts), bias)

    def embedding(self, stored: Stored) -> Embedding:
        weight = self._decoded([stored])
        self._tables[id(stored)] = (stored, weight)
        return DenseEmbedding(weight)

    def layers(self, layers: Sequence[Layer], shape: Shape) -> Layers:
        return TritonLayers(layers, shape)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def _decoded(self, parts: Sequence[Stored]) -> Tensor:
        return decoded(parts, self.dtype).to(self._device)


class TritonLayers(TorchLayers):
    """`kernels.layers.Layers`; tensors of rows lie on the device, their tuples on the host."""

    @staticmethod
    def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    @staticmethod
    def _add_norm(update: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(update, residual, weight, eps)

    @staticmethod
    def _gated(x: Tensor) -> Tensor:
        return silu_mul(x)

    @staticmethod
    def _attend(
        qkv: Tensor,
        kv: Tensor,
        rows: PagedRows,
        turns: tuple[Tensor, Tensor],
        window: int | None,
    ) -> Tensor:
        return attention(qkv, kv, rows, turns, window)


def attention(
    qkv: Tensor,
    kv: Tensor,
    rows: PagedRows,
    turns: tuple[Tensor, Tensor],
    window: int | None = None,
) -> Tensor:
    """As `kernels.layers.attention`, but q and k are rotated in place, in `qkv`."""
    tokens, total, dim = qkv.shape
    kv_heads = kv.shape[2]
    heads = total - 2 * kv_heads
    queries, keys, values = qkv.split((heads, kv_heads, kv_heads), 1)
    rotate(queries, keys, *turns)
    write_kv(keys, values, kv, rows.slots)
    out = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    single, scale = rows.decode, dim**-0.5
    if single:
        decode_attention(
            queries[:single],
            kv,
            rows.tables[:single],
            rows.spans[:single, 2],
            max(rows.starts[:single]) + 1,
            scale,
            window=window,
            out=out[:single],
        )
    if single < len(rows.lengths):
        prefill_attention(
            queries,
            kv,
            rows.tables[single:],
            rows.spans[single:],
            scale,
            window=window,
            out=out,
        )
    return out.view(tokens, heads * dim)
