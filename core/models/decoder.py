"""The one decoder skeleton: embedding, layers of attention and MLP on a residual, norm, head.

A decoder computes; it does not know ranks, requests, or how blocks are found. Its parts are
public and replaceable, so that sharding and other transformations stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from core.models.config import ModelConfig
from kernels.layers import Layer, Shape
from kernels.linear import Embedding, Linear
from kernels.ops import Ops
from kernels.paged_attention import PagedRows


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of one step, all sequences one after another.

    `tokens`, `positions` [tokens] int64; `groups`: rows and block tables for each KV group;
    `sampled` [n] int64: the tokens whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    groups: tuple[PagedRows, ...]
    sampled: Tensor


class Decoder:
    """Made of vectors and products of `ops`."""

    def __init__(
        self,
        *,
        config: ModelConfig,
        ops: Ops,
        embedding: Embedding,
        layers: Sequence[Layer],
        shape: Shape,
        norm: Tensor,
        head: Linear,
    ) -> None:
        self.config = config
        self.ops = ops
        self.embedding = embedding
        self.layers = tuple(layers)
        self.shape = shape
        self.norm = norm
        self.head = head
        self._run = ops.layers(self.layers, shape)

    def forward(self, batch: ForwardBatch, kv: Sequence[Tensor]) -> Tensor:
        """Logits [n, vocabulary] fp32 of the sampled tokens; n may be 0.

        `kv[layer]` [blocks, 2, kv_heads, block_tokens, head_dim] is read and gains the KV of
        the step's tokens.
        """
        residual = self.embedding(batch.tokens)
        residual = self._run(residual, batch.positions, batch.groups, kv)
        x = self.ops.rms_norm(residual[batch.sampled], self.norm, self.config.norm_eps)
        return self.head(x).float()
