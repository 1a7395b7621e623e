"""Reads the weights of latent attention (DeepSeek-V3) into the form that `kernels` computes."""

from __future__ import annotations

import torch

from core.errors import ConfigError
from core.models.reader import Reader
from kernels.layers import LatentAttention

_NORM_EPS = 1e-6
"""Of both inner norms, whatever the model's own is (DeepSeek's reference code, transformers)."""


def read_latent(reader: Reader, name: str) -> LatentAttention:
    """`name` is of the layer's attention. Raises ConfigError."""
    config, ops = reader.config, reader.ops
    sizes, hidden = config.latent, config.hidden
    if sizes is None:
        raise ConfigError(f"{name}: the model has no latent attention")
    heads, key = config.heads, sizes.nope + sizes.rope
    query = ("q_b_proj", sizes.query_rank) if sizes.query_rank else ("q_proj", hidden)
    query_up = reader.stored(f"{name}.{query[0]}.weight", (heads * key, query[1]))
    kv_rows = sizes.rank + sizes.rope
    kv_down = reader.stored(f"{name}.kv_a_proj_with_mqa.weight", (kv_rows, hidden))
    kv_bias = None
    if config.qkv_bias:
        kv_bias = reader.stored(f"{name}.kv_a_proj_with_mqa.bias", (kv_rows,))
    if sizes.interleaved:
        query_up = query_up.take(_halves(heads, sizes.nope, sizes.rope))
        order = _halves(1, sizes.rank, sizes.rope)
        kv_down = kv_down.take(order)
        kv_bias = kv_bias and kv_bias.take(order)
    unfold = reader.stored(
        f"{name}.kv_b_proj.weight", (heads * (sizes.nope + sizes.value), sizes.rank)
    )
    up = ops.matrix([unfold]).view(heads, sizes.nope + sizes.value, sizes.rank)
    query_down = query_norm = None
    if sizes.query_rank:
        query_down = reader.linear(
            (f"{name}.q_a_proj",), hidden, (sizes.query_rank,), bias=config.qkv_bias
        )
        query_norm = reader.vector(f"{name}.q_a_layernorm.weight", sizes.query_rank)
    return LatentAttention(
        query_down=query_down,
        query_norm=query_norm,
        query_up=ops.linear([query_up], None),
        kv_down=ops.linear([kv_down], None if kv_bias is None else ops.vector(kv_bias)),
        kv_norm=reader.vector(f"{name}.kv_a_layernorm.weight", sizes.rank),
        key_up=up[:, : sizes.nope],
        value_up=up[:, sizes.nope :],
        output=reader.linear(
            (f"{name}.o_proj",), heads * sizes.value, (hidden,), bias=config.o_bias
        ),
        scale=config.attention_scale,
        rotary_scale=config.rotary_scale,
        norm_eps=_NORM_EPS,
    )


def _halves(heads: int, plain: int, rope: int) -> torch.Tensor:
    """For rows of `heads` times `plain` and then `rope` stored as pairs (0, 1), (2, 3), …: the
    stored row of each row when the pairs are (i, i + rope / 2)."""
    turned = torch.arange(rope).view(-1, 2).T.flatten() + plain
    one = torch.cat((torch.arange(plain), turned))
    return (torch.arange(heads)[:, None] * (plain + rope) + one).flatten()
