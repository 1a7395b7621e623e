"""The one decoder skeleton: embedding, layers of attention and MLP on a residual, norm, head.

A decoder computes; it does not know ranks, requests, or how blocks are found. Its parts are
public and replaceable, so that sharding and other transformations stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.models.config import ModelConfig
from kernels.linear import Linear
from kernels.ops import Ops
from kernels.paged_attention import PagedRows
from kernels.rotary import angles


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of one step, all sequences one after another.

    `tokens`, `positions` [tokens] int64; `sampled` [n] int64: the tokens whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    rows: PagedRows
    sampled: Tensor


@dataclass(slots=True)
class Layer:
    """`qkv` gives query, key and value heads in this order; `gate_up` the gate first."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """`embedding` [vocabulary, hidden]; `inverse_frequencies` [head_dim/2] fp32."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        ops: Ops,
        embedding: Tensor,
        layers: Sequence[Layer],
        norm: Tensor,
        head: Linear,
        inverse_frequencies: Tensor,
    ) -> None:
        self.config = config
        self.ops = ops
        self.embedding = embedding
        self.layers = list(layers)
        self.norm = norm
        self.head = head
        self.inverse_frequencies = inverse_frequencies

    def forward(self, batch: ForwardBatch, kv: Sequence[Tensor]) -> Tensor:
        """Logits [n, vocabulary] fp32 of the sampled tokens; n may be 0.

        `kv[layer]` [blocks, 2, kv_heads, block_tokens, head_dim] is read and gains the KV of
        the step's tokens.
        """
        config, ops = self.config, self.ops
        heads = config.heads + 2 * config.kv_heads
        scale = config.head_dim**-0.5
        cos, sin = angles(batch.positions, self.inverse_frequencies)
        residual = torch.nn.functional.embedding(batch.tokens, self.embedding)
        update = None
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            if update is None:
                x = ops.rms_norm(residual, layer.attention_norm, config.norm_eps)
            else:
                x = ops.add_rms_norm(update, residual, layer.attention_norm, config.norm_eps)
            qkv = layer.qkv(x).view(-1, heads, config.head_dim)
            mixed = ops.attention(qkv, layer_kv, batch.rows, cos, sin, scale)
            update = layer.output(mixed)
            x = ops.add_rms_norm(update, residual, layer.mlp_norm, config.norm_eps)
            update = layer.down(ops.silu_mul(layer.gate_up(x)))
        if update is not None:
            residual = residual[batch.sampled] + update[batch.sampled]
        x = ops.rms_norm(residual, self.norm, config.norm_eps)
        return self.head(x).float()
