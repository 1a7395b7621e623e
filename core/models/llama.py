"""Builds a decoder of the Llama family (llama, qwen2) from a weight source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.errors import ConfigError
from core.models.config import ModelConfig
from core.models.decoder import Decoder
from core.models.quantised import StoredTensor
from core.models.weights import WeightSource
from kernels.layers import Layer, Shape
from kernels.linear import Linear
from kernels.ops import Ops


def build(
    source: WeightSource,
    *,
    ops: Ops,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Decoder:
    """Read all weights with `ops`, which copies what it does not use in place. The source may be
    closed afterwards. Raises ConfigError."""
    config = source.config
    reader = _Reader(source, ops)
    table = reader.stored("model.embed_tokens.weight", (config.vocab_size, config.hidden))
    embedding = ops.embedding(table)
    layers = []
    for index in range(config.layers):
        layers.append(_layer(reader, config, index))
        progress((index + 1) / (config.layers + 1))
    if config.tied or "lm_head.weight" not in source.names:
        head = ops.linear([table], None)
    else:
        head = reader.linear(("lm_head",), config.hidden, (config.vocab_size,), bias=False)
    divisors = None
    if config.rope_stored:
        divisors = tuple(source.read("rope_freqs.weight").numbers(torch.float32).tolist())
    shape = Shape(
        hidden=config.hidden,
        width=config.intermediate,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        inverse_frequencies=torch.tensor(config.inverse_frequencies(divisors), dtype=torch.float32),
    )
    return Decoder(
        config=config,
        ops=ops,
        embedding=embedding,
        layers=layers,
        shape=shape,
        norm=reader.vector("model.norm.weight", config.hidden),
        head=head,
    )


def _layer(reader: _Reader, config: ModelConfig, index: int) -> Layer:
    name = f"model.layers.{index}"
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return Layer(
        attention_norm=reader.vector(f"{name}.input_layernorm.weight", config.hidden),
        qkv=reader.linear(
            (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            config.hidden,
            (q_rows, kv_rows, kv_rows),
            bias=config.qkv_bias,
        ),
        output=reader.linear(
            (f"{attention}.o_proj",), q_rows, (config.hidden,), bias=config.o_bias
        ),
        mlp_norm=reader.vector(f"{name}.post_attention_layernorm.weight", config.hidden),
        gate_up=reader.linear(
            (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            config.hidden,
            (config.intermediate, config.intermediate),
            bias=config.mlp_bias,
        ),
        down=reader.linear(
            (f"{mlp}.down_proj",), config.intermediate, (config.hidden,), bias=config.mlp_bias
        ),
        group=config.kv_groups[index],
        window=config.window(index),
    )


class _Reader:
    """Reads parts of a model, several stored matrices into one product."""

    def __init__(self, source: WeightSource, ops: Ops) -> None:
        self._source = source
        self._ops = ops

    def vector(self, name: str, length: int) -> Tensor:
        return self._ops.vector(self.stored(name, (length,)))

    def linear(
        self, names: Sequence[str], columns: int, rows: Sequence[int], *, bias: bool
    ) -> Linear:
        """One product with all rows of `names`, in order."""
        parts = [
            self.stored(f"{name}.weight", (count, columns))
            for name, count in zip(names, rows, strict=True)
        ]
        if not bias:
            return self._ops.linear(parts, None)
        values = [
            self.vector(f"{name}.bias", count) for name, count in zip(names, rows, strict=True)
        ]
        return self._ops.linear(parts, torch.cat(values))

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._source.read(name)
        if stored.shape != shape:
            raise ConfigError(
                f"tensor {name} has the shape {list(stored.shape)}, expected {list(shape)}"
            )
        return stored
