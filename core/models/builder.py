"""Builds the decoder of any family from a weight source, whole or part by part.

A family is what its configuration says: heads or latents, norms on heads, a gated MLP or experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.models.decoder import Decoder
from core.models.experts import read_experts
from core.models.latent import read_latent
from core.models.reader import Reader
from core.models.weights import WeightSource
from kernels.layers import HeadAttention, Layer, Shape
from kernels.linear import Embedding, Linear
from kernels.ops import Ops

_TABLE = "model.embed_tokens.weight"


def build(
    source: WeightSource,
    *,
    ops: Ops,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Decoder:
    """Read all weights with `ops`, which copies what it does not use in place. The source may be
    closed afterwards. Raises ConfigError."""
    config = source.config
    reader = Reader(source, ops)
    embedding, tied = read_embedding(reader)
    layers = []
    for index in range(config.layers):
        layers.append(read_layer(reader, index))
        progress((index + 1) / (config.layers + 1))
    return Decoder(
        config=config,
        ops=ops,
        embedding=embedding,
        layers=layers,
        shape=read_shape(reader),
        norm=read_norm(reader),
        head=tied or read_head(reader),
    )


def read_embedding(reader: Reader) -> tuple[Embedding, Linear | None]:
    """The embedding and, where the model has no head of its own, the same numbers as a head."""
    config = reader.config
    table = reader.stored(_TABLE, (config.vocab_size, config.hidden))
    embedding = reader.ops.embedding(table)
    if config.tied or "lm_head.weight" not in reader.source.names:
        return embedding, reader.ops.linear([table], None)
    return embedding, None


def read_head(reader: Reader) -> Linear:
    """The head alone, whoever else has the embedding."""
    config = reader.config
    shape = (config.vocab_size, config.hidden)
    own = not config.tied and "lm_head.weight" in reader.source.names
    return reader.ops.linear([reader.stored("lm_head.weight" if own else _TABLE, shape)], None)


def read_norm(reader: Reader) -> Tensor:
    return reader.vector("model.norm.weight", reader.config.hidden)


def read_shape(reader: Reader) -> Shape:
    config = reader.config
    divisors = None
    if config.rope_stored:
        stored = reader.source.read("rope_freqs.weight")
        divisors = tuple(stored.numbers(torch.float32).tolist())
    frequencies = torch.tensor(config.inverse_frequencies(divisors), dtype=torch.float32)
    return Shape(
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        scale=config.attention_scale,
        inverse_frequencies=reader.ops.placed(frequencies),
    )


def read_layer(reader: Reader, index: int, experts: range | None = None) -> Layer:
    """`experts`: those of a mixture that are kept here, None: all."""
    config = reader.config
    name = f"model.layers.{index}"
    mixture = config.moe is not None and index in config.moe.layers
    return Layer(
        attention_norm=reader.vector(f"{name}.input_layernorm.weight", config.hidden),
        attention=(
            read_latent(reader, f"{name}.self_attn")
            if config.latent is not None
            else _heads(reader, f"{name}.self_attn", index)
        ),
        mlp_norm=reader.vector(f"{name}.post_attention_layernorm.weight", config.hidden),
        mlp=(
            read_experts(reader, f"{name}.mlp", experts)
            if mixture
            else reader.gated(f"{name}.mlp", config.intermediate, bias=config.mlp_bias)
        ),
        group=config.kv_groups[index],
    )


def _heads(reader: Reader, name: str, index: int) -> HeadAttention:
    config = reader.config
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
    norms: list[Tensor | None] = [None, None]
    if config.qk_norm:
        norms = [
            reader.vector(f"{name}.{kind}_norm.weight", config.head_dim) for kind in ("q", "k")
        ]
    return HeadAttention(
        qkv=reader.linear(names, config.hidden, (q_rows, kv_rows, kv_rows), bias=config.qkv_bias),
        output=reader.linear((f"{name}.o_proj",), q_rows, (config.hidden,), bias=config.o_bias),
        query_norm=norms[0],
        key_norm=norms[1],
        window=config.window(index),
    )
