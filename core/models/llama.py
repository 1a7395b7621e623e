"""Builds a decoder of the Llama family (llama, qwen2) from a weight source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.errors import ConfigError
from core.models.config import ModelConfig
from core.models.decoder import Decoder, Layer
from core.models.quantised import StoredTensor
from core.models.weights import WeightSource
from kernels.linear import Dense, Linear
from kernels.ops import Ops


def build(
    source: WeightSource,
    *,
    dtype: torch.dtype,
    ops: Ops,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Decoder:
    """Read all weights into `dtype`; where `ops` can use the stored blocks too, keep them beside.
    The source may be closed afterwards. Raises ConfigError."""
    config = source.config
    reader = _Reader(source, dtype, ops)
    layers = []
    for index in range(config.layers):
        layers.append(_layer(reader, config, f"model.layers.{index}"))
        progress((index + 1) / (config.layers + 1))
    hidden = (config.hidden,)
    embedding = reader.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden))
    tied = config.tied or "lm_head.weight" not in source.names
    if tied:
        head = reader.quantised(Dense(embedding), [source.read("model.embed_tokens.weight")])
    else:
        head = reader.linear(("lm_head",), config.hidden, (config.vocab_size,), bias=False)
    divisors = None
    if config.rope_stored:
        divisors = tuple(source.read("rope_freqs.weight").numbers(torch.float32).tolist())
    return Decoder(
        config=config,
        ops=ops,
        embedding=embedding,
        layers=layers,
        norm=reader.tensor("model.norm.weight", hidden),
        head=head,
        inverse_frequencies=torch.tensor(config.inverse_frequencies(divisors), dtype=torch.float32),
    )


def _layer(reader: _Reader, config: ModelConfig, name: str) -> Layer:
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return Layer(
        attention_norm=reader.tensor(f"{name}.input_layernorm.weight", (config.hidden,)),
        qkv=reader.linear(
            (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            config.hidden,
            (q_rows, kv_rows, kv_rows),
            bias=config.qkv_bias,
        ),
        output=reader.linear(
            (f"{attention}.o_proj",), q_rows, (config.hidden,), bias=config.o_bias
        ),
        mlp_norm=reader.tensor(f"{name}.post_attention_layernorm.weight", (config.hidden,)),
        gate_up=reader.linear(
            (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            config.hidden,
            (config.intermediate, config.intermediate),
            bias=config.mlp_bias,
        ),
        down=reader.linear(
            (f"{mlp}.down_proj",), config.intermediate, (config.hidden,), bias=config.mlp_bias
        ),
    )


class _Reader:
    """Reads parts of a model into the compute dtype, several stored matrices into one."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, ops: Ops) -> None:
        self._source = source
        self._dtype = dtype
        self._ops = ops

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._stored(name, shape).numbers(self._dtype)

    def linear(
        self, names: Sequence[str], columns: int, rows: Sequence[int], *, bias: bool
    ) -> Linear:
        """One matrix of all rows of `names`, in order."""
        parts = [
            self._stored(f"{name}.weight", (count, columns))
            for name, count in zip(names, rows, strict=True)
        ]
        weight = torch.empty((sum(rows), columns), dtype=self._dtype)
        first = 0
        for part, count in zip(parts, rows, strict=True):
            part.decode(weight[first : first + count])
            first += count
        if bias:
            values = [
                self.tensor(f"{name}.bias", (count,))
                for name, count in zip(names, rows, strict=True)
            ]
            return Dense(weight, torch.cat(values))
        return self.quantised(Dense(weight), parts)

    def quantised(self, dense: Dense, parts: Sequence[StoredTensor]) -> Linear:
        encodings = {part.encoding for part in parts}
        if len(encodings) > 1:
            return dense
        blocks = torch.cat([part.data for part in parts])
        return self._ops.quantised(dense, encodings.pop(), blocks)

    def _stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._source.read(name)
        if stored.shape != shape:
            raise ConfigError(
                f"tensor {name} has the shape {list(stored.shape)}, expected {list(shape)}"
            )
        return stored
