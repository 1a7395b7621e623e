"""The layers of a decoder between embedding and last norm: what they are made of.

A layer: residual += attention(norm(residual)); residual += mlp(norm(residual)). `stepwise` computes
them operation by operation on any backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.experts import Experts
from kernels.linear import Linear
from kernels.paged_attention import PagedRows
from kernels.routing import Routing


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Grouped heads. `qkv` gives query, key and value heads in this order; `query_norm` and
    `key_norm` [head_dim] norm each head before it is rotated, both or neither. A token sees the
    last `window` positions, None: all."""

    qkv: Linear
    output: Linear
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention over one compressed vector a token (DeepSeek-V2, 2024, §2.1): kv_down gives it and
    the one rotated key part that all heads share, [rank + rope]; it is normed before it is kept.

    `query_up` gives for each head nope + rope values, from the hidden state or, with `query_down`
    and `query_norm`, from its compressed form. `key_up` [heads, nope, rank] and `value_up`
    [heads, value, rank] unfold the latents; they are applied to the query and to what attention
    gives, so that the latents are read as they lie. Scores are times `scale`, their rotated part
    also times `rotary_scale`. `norm_eps` is of both inner norms.
    """

    query_down: Linear | None
    query_norm: Tensor | None
    query_up: Linear
    kv_down: Linear
    kv_norm: Tensor
    key_up: Tensor
    value_up: Tensor
    output: Linear
    scale: float
    rotary_scale: float
    norm_eps: float


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`gate_up` gives the gate first."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ExpertsMlp:
    """A mixture: `router` [experts, hidden] and `correction` [experts] in fp32 choose, `experts`
    compute, and what all tokens pass is `shared`."""

    router: Tensor
    correction: Tensor | None
    routing: Routing
    experts: Experts
    shared: GatedMlp | None


@dataclass(frozen=True, slots=True)
class Layer:
    """`group` is the KV group whose blocks it uses."""

    attention_norm: Tensor
    attention: HeadAttention | LatentAttention
    mlp_norm: Tensor
    mlp: GatedMlp | ExpertsMlp
    group: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """What all layers share. `heads`, `kv_heads` and `head_dim` are of `HeadAttention`, whose
    scores are times `scale`. `inverse_frequencies` [rotary dim / 2] fp32, one per rotary pair.

    `reduce` takes what attention or an MLP gives [tokens, hidden] to what is added to the residual:
    where these are partial sums, it joins them. None: they are whole.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float
    inverse_frequencies: Tensor
    reduce: Callable[[Tensor], Tensor] | None = None


class Layers(Protocol):
    def __call__(
        self, residual: Tensor, positions: Tensor, groups: Sequence[PagedRows], kv: Sequence[Tensor]
    ) -> Tensor:
        """residual [tokens, hidden], which may be overwritten → the same after all layers.

        `positions` [tokens] int64; `groups`: rows and block tables for each KV group;
        `kv[layer]` [blocks, 2, kv_heads, block_tokens, head_dim], of latents
        [blocks, 1, 1, block_tokens, rank + rope], gains the KV of the tokens.
        """
        ...
