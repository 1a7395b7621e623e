"""The layers of a decoder between embedding and last norm, on tokens of many sequences at once.

A layer: residual += output(attention(qkv(norm(residual)))); residual += down(silu·up(norm)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.gated import silu_mul
from kernels.kv_write import write_kv
from kernels.linear import Linear
from kernels.paged_attention import PagedRows, paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import angles, rotary


@dataclass(frozen=True, slots=True)
class Layer:
    """`qkv` gives query, key and value heads in this order; `gate_up` the gate first. `group` is
    the KV group whose blocks it uses; a token sees the last `window` positions, None: all."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    group: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """What all layers share. `inverse_frequencies` [head_dim/2] fp32, one per rotary pair."""

    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    inverse_frequencies: Tensor


class Layers(Protocol):
    def __call__(
        self, residual: Tensor, positions: Tensor, groups: Sequence[PagedRows], kv: Sequence[Tensor]
    ) -> Tensor:
        """residual [tokens, hidden], which may be overwritten → the same after all layers.

        `positions` [tokens] int64; `groups`: rows and block tables for each KV group;
        `kv[layer]` [blocks, 2, kv_heads, block_tokens, head_dim] gains the KV of the tokens.
        """
        ...


class TorchLayers:
    """The reference: any device, any dtype. Another backend gives its own operations below."""

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

    def __init__(self, layers: Sequence[Layer], shape: Shape) -> None:
        self._layers = tuple(layers)
        self._shape = shape

    def __call__(
        self, residual: Tensor, positions: Tensor, groups: Sequence[PagedRows], kv: Sequence[Tensor]
    ) -> Tensor:
        shape = self._shape
        turns = angles(positions, shape.inverse_frequencies)
        update: Tensor | None = None
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            if update is None:
                x = self._norm(residual, layer.attention_norm, shape.norm_eps)
            else:
                x = self._add_norm(update, residual, layer.attention_norm, shape.norm_eps)
            qkv = layer.qkv(x).view(-1, shape.heads + 2 * shape.kv_heads, shape.head_dim)
            mixed = self._attend(qkv, layer_kv, groups[layer.group], turns, layer.window)
            update = layer.output(mixed)
            x = self._add_norm(update, residual, layer.mlp_norm, shape.norm_eps)
            update = layer.down(self._gated(layer.gate_up(x)))
        return residual if update is None else residual + update


def attention(
    qkv: Tensor,
    kv: Tensor,
    rows: PagedRows,
    turns: tuple[Tensor, Tensor],
    window: int | None = None,
) -> Tensor:
    """qkv [tokens, heads + 2·kv_heads, dim]: rotate q and k, store k and v, attend.

    Returns [tokens, heads · dim]. `turns`: cos and sin of each token.
    """
    tokens, total, dim = qkv.shape
    kv_heads = kv.shape[2]
    heads = total - 2 * kv_heads
    rotated = rotary(qkv[:, : heads + kv_heads], *turns)
    write_kv(rotated[:, heads:], qkv[:, heads + kv_heads :], kv, rows.slots)
    mixed = paged_attention(rotated[:, :heads], kv, rows, dim**-0.5, window)
    return mixed.view(tokens, heads * dim)
