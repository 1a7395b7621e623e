"""Decoder layers from the Triton kernels; matrix products stay PyTorch's (cuBLAS)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.experts import DenseExperts, Experts, stacked
from kernels.latent_attention import latent_attention
from kernels.layers import HeadAttention, Layer, Layers, Shape
from kernels.linear import Dense, DenseEmbedding, Embedding, Linear, Stored, decoded
from kernels.paged_attention import PagedRows
from kernels.stepwise import Places, TorchLayers
from kernels.triton.decode_attention import decode_attention
from kernels.triton.gated import silu_mul
from kernels.triton.grouped_matmul import grouped_matmul
from kernels.triton.kv_write import write_kv, write_latents
from kernels.triton.latent_attention import latent_decode_attention
from kernels.triton.prefill_attention import prefill_attention
from kernels.triton.rms_norm import add_rms_norm, rms_norm
from kernels.triton.rotary import rotate


class TritonOps:
    """`kernels.ops.Ops` on `device`: weights are decoded on the host and moved there once."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cuda") -> None:
        self.dtype = dtype
        self._device = torch.device(device)
        self._tables: dict[int, tuple[Stored, Tensor]] = {}

    def placed(self, numbers: Tensor) -> Tensor:
        return numbers.to(self._device)

    def vector(self, stored: Stored) -> Tensor:
        return self.matrix([stored])[0]

    def matrix(self, parts: Sequence[Stored], *, exact: bool = False) -> Tensor:
        return decoded(parts, torch.float32 if exact else self.dtype).to(self._device)

    def linear(self, parts: Sequence[Stored], bias: Tensor | None) -> Linear:
        if len(parts) == 1 and id(parts[0]) in self._tables:  # a head tied to the embedding
            return Dense(self._tables[id(parts[0])][1], bias)
        return Dense(self.matrix(parts), bias)

    def embedding(self, stored: Stored) -> Embedding:
        weight = self.matrix([stored])
        self._tables[id(stored)] = (stored, weight)
        return DenseEmbedding(weight)

    def experts(
        self, gate_up: Sequence[Sequence[Stored]], down: Sequence[Sequence[Stored]]
    ) -> Experts:
        dtype, device = self.dtype, self._device
        return TritonExperts(stacked(gate_up, dtype, device), stacked(down, dtype, device))

    def layers(self, layers: Sequence[Layer], shape: Shape) -> Layers:
        return TritonLayers(layers, shape)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)


class TritonExperts(DenseExperts):
    """Nothing here waits for the device: the counts of tokens stay there."""

    @staticmethod
    def _gated(gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    @staticmethod
    def _grouped(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        return grouped_matmul(x, weights, offsets)


class TritonLayers(TorchLayers):
    """`kernels.layers.Layers`; tensors of rows lie on the device, their tuples on the host."""

    def _norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def _add_norm(self, update: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(update, residual, weight, eps)

    def _gated(self, x: Tensor) -> Tensor:
        return silu_mul(x)

    def _turned(self, queries: Tensor, key: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        rotate(queries, key, places.cos, places.sin)
        return queries, key

    def _attend(
        self, qkv: Tensor, kv: Tensor, rows: PagedRows, places: Places, attention: HeadAttention
    ) -> Tensor:
        """q and k are normed and rotated in place, in `qkv`."""
        shape = self._shape
        tokens, total, dim = qkv.shape
        kv_heads = kv.shape[2]
        heads = total - 2 * kv_heads
        queries, keys, values = qkv.split((heads, kv_heads, kv_heads), 1)
        norms = None
        if attention.query_norm is not None and attention.key_norm is not None:
            norms = (attention.query_norm, attention.key_norm)
        rotate(queries, keys, places.cos, places.sin, norms=norms, eps=shape.norm_eps)
        write_kv(keys, values, kv, rows.slots)
        out = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
        single = rows.decode
        if single:
            decode_attention(
                queries[:single],
                kv,
                rows.tables[:single],
                rows.spans[:single, 2],
                max(rows.starts[:single]) + 1,
                shape.scale,
                window=attention.window,
                out=out[:single],
            )
        if single < len(rows.lengths):
            prefill_attention(
                queries,
                kv,
                rows.tables[single:],
                rows.spans[single:],
                shape.scale,
                window=attention.window,
                out=out,
            )
        return out.view(tokens, heads * dim)

    def _keep_latents(self, latents: Tensor, pool: Tensor, rows: PagedRows) -> None:
        write_latents(latents, pool, rows.slots)

    def _attend_latents(
        self, queries: Tensor, pool: Tensor, rows: PagedRows, scale: float, rank: int
    ) -> Tensor:
        """Rows of one token by the kernel; chunks of prompts are large products anyway."""
        single = rows.decode
        parts = []
        if single:
            parts.append(
                latent_decode_attention(
                    queries[:single],
                    pool,
                    rows.tables[:single],
                    rows.spans[:single, 2],
                    max(rows.starts[:single]) + 1,
                    scale,
                    rank=rank,
                )
            )
        if single < len(rows.lengths):
            chunks = rows.part(single, len(rows.lengths))
            parts.append(latent_attention(queries[single:], pool, chunks, scale, rank))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
