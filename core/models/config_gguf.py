"""A model's configuration from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import ConfigError
from core.models.config import ModelConfig
from core.models.rope import RopeScaling

GGUF_FAMILIES = ("llama", "qwen2", "qwen3")
"""Architectures, by the names that GGUF gives them."""


def from_gguf(
    metadata: Mapping[str, object], tensors: Mapping[str, tuple[int, ...]], where: str
) -> ModelConfig:
    """From GGUF metadata and the shapes of its tensors. Raises ConfigError."""
    family = metadata.get("general.architecture")
    if not isinstance(family, str):
        raise ConfigError(f"{where}: names no architecture")
    if family not in GGUF_FAMILIES:
        raise ConfigError(
            f"{where}: architecture {family!r} is not supported in a GGUF file; known: "
            f"{', '.join(GGUF_FAMILIES)}"
        )

    def number(key: str, default: float | None = None) -> float:
        value = metadata.get(f"{family}.{key}", default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(f"{where}: {family}.{key} is {value!r}, not one number")
        return value

    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{where}: has no tensor token_embd.weight")
    heads = int(number("attention.head_count"))
    hidden = int(number("embedding_length"))
    head_dim = int(number("attention.key_length", hidden // heads))
    if number("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"{where}: rotary embedding of a part of the head is not supported")
    if number("expert_count", 0):
        raise ConfigError(f"{where}: mixture-of-experts {family} is not supported")
    return ModelConfig(
        family=family,
        vocab_size=tensors["token_embd.weight"][0],
        hidden=hidden,
        layers=int(number("block_count")),
        heads=heads,
        kv_heads=int(number("attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate=int(number("feed_forward_length")),
        context=int(number("context_length")),
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base", 10000.0),
        rope_scaling=_scaling(metadata, family, where),
        rope_stored="rope_freqs.weight" in tensors,
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        permuted=family == "llama",
    )


def _scaling(metadata: Mapping[str, object], family: str, where: str) -> RopeScaling | None:
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = metadata.get(f"{family}.rope.scaling.factor")
    if kind != "linear" or not isinstance(factor, int | float):
        raise ConfigError(f"{where}: rope scaling {kind!r} is not supported; known: none, linear")
    return RopeScaling(kind="linear", factor=float(factor))
