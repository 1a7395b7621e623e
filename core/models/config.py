"""What a decoder-only model is, in one frozen form, from GGUF metadata or config.json.

Every number is checked here; an architecture or a variation that the decoder cannot compute is
refused by name (ConfigError) before any weight is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.errors import ConfigError

FAMILIES = ("llama", "qwen2")
"""Architectures, by the name that both GGUF and config.json give them."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched: linear, or llama3 (by wavelength)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`rope_stored`: the file holds divisors of the rotary frequencies as a tensor (GGUF).
    `permuted`: q and k rows are stored in pairs order and must be put back. Of `windowed` layers
    a token sees the last `sliding_window` positions."""

    family: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rope_stored: bool = False
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    permuted: bool = False
    sliding_window: int = 0
    windowed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim",
                      "intermediate", "context"):  # fmt: skip
            if getattr(self, field) < 1:
                raise ConfigError(f"the model's {field} is {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"the model has {self.heads} query heads for {self.kv_heads} KV heads: "
                "not a multiple"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head size {self.head_dim} is odd: no rotary pairs")
        if self.windowed and self.sliding_window < 1:
            raise ConfigError(f"the model's sliding window is {self.sliding_window}")

    def window(self, layer: int) -> int | None:
        return self.sliding_window if layer in self.windowed else None

    @property
    def kv_groups(self) -> tuple[int, ...]:
        """The KV group of each layer: 0 keeps all tokens, 1 forgets what its window has passed.
        Layers that all have a window share group 0: there is always one that keeps all."""
        if len(set(self.windowed)) == self.layers:
            return (0,) * self.layers
        return tuple(int(layer in self.windowed) for layer in range(self.layers))

    def inverse_frequencies(self, stored: tuple[float, ...] | None = None) -> list[float]:
        """One per rotary pair, scaled. `stored`: the divisors of a `rope_stored` file."""
        half = self.head_dim // 2
        plain = [self.rope_theta ** (-i / half) for i in range(half)]
        if stored is not None:
            return [value / divisor for value, divisor in zip(plain, stored, strict=True)]
        scaling = self.rope_scaling
        if scaling is None:
            return plain
        if scaling.kind == "linear":
            return [value / scaling.factor for value in plain]
        return [_llama3(value, scaling) for value in plain]


def _llama3(frequency: float, scaling: RopeScaling) -> float:
    """Long waves are stretched by the factor, short ones stay, those between are blended."""
    turns = scaling.original_context * frequency / (2 * math.pi)
    if turns <= scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns >= scaling.high_freq_factor:
        return frequency
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return frequency * (kept + (1 - kept) / scaling.factor)


# ------------------------------------------------------------------ config.json


class _Rope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class _Json(msgspec.Struct):
    """The fields of config.json that matter here; others are ignored."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: list[str] | None = None


def from_json(path: Path) -> ModelConfig:
    """Read config.json. Raises ConfigError."""
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise ConfigError(f"{path}: has no model_type")
    _known_family(raw["model_type"], str(path))
    try:
        read = msgspec.convert(raw, _Json)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    if read.hidden_act != "silu":
        raise ConfigError(f"{path}: activation {read.hidden_act!r} is not supported, only silu")
    rope = read.rope_parameters or read.rope_scaling or _Rope()
    qwen2 = read.model_type == "qwen2"
    return ModelConfig(
        family=read.model_type,
        vocab_size=read.vocab_size,
        hidden=read.hidden_size,
        layers=read.num_hidden_layers,
        heads=read.num_attention_heads,
        kv_heads=read.num_key_value_heads or read.num_attention_heads,
        head_dim=read.head_dim or read.hidden_size // read.num_attention_heads,
        intermediate=read.intermediate_size,
        context=read.max_position_embeddings,
        norm_eps=read.rms_norm_eps,
        rope_theta=rope.rope_theta or read.rope_theta or 10000.0,
        rope_scaling=_scaling(rope, str(path)),
        tied=read.tie_word_embeddings,
        qkv_bias=read.attention_bias or qwen2,
        o_bias=read.attention_bias and not qwen2,
        mlp_bias=read.mlp_bias,
        sliding_window=read.sliding_window or 0,
        windowed=_windowed(read, str(path)),
    )


def _windowed(read: _Json, where: str) -> tuple[int, ...]:
    if not read.use_sliding_window:
        return ()
    if read.layer_types is None:
        return tuple(range(read.max_window_layers, read.num_hidden_layers))
    unknown = set(read.layer_types) - {"full_attention", "sliding_attention"}
    if unknown or len(read.layer_types) != read.num_hidden_layers:
        raise ConfigError(
            f"{where}: layer_types must be full_attention or sliding_attention for each layer"
        )
    return tuple(n for n, kind in enumerate(read.layer_types) if kind == "sliding_attention")


def _scaling(rope: _Rope, where: str) -> RopeScaling | None:
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ConfigError(
            f"{where}: rope scaling {kind!r} is not supported; known: default, linear, llama3"
        )
    return RopeScaling(
        kind=kind,
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_context=rope.original_max_position_embeddings,
    )


# ------------------------------------------------------------------ GGUF


def from_gguf(
    metadata: Mapping[str, object], tensors: Mapping[str, tuple[int, ...]], where: str
) -> ModelConfig:
    """From GGUF metadata and the shapes of its tensors. Raises ConfigError."""
    family = metadata.get("general.architecture")
    if not isinstance(family, str):
        raise ConfigError(f"{where}: names no architecture")
    _known_family(family, where)

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
        rope_scaling=_gguf_scaling(metadata, family, where),
        rope_stored="rope_freqs.weight" in tensors,
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        permuted=family == "llama",
    )


def _gguf_scaling(metadata: Mapping[str, object], family: str, where: str) -> RopeScaling | None:
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = metadata.get(f"{family}.rope.scaling.factor")
    if kind != "linear" or not isinstance(factor, int | float):
        raise ConfigError(f"{where}: rope scaling {kind!r} is not supported; known: none, linear")
    return RopeScaling(kind="linear", factor=float(factor))


def _known_family(name: str, where: str) -> None:
    if name not in FAMILIES:
        raise ConfigError(
            f"{where}: architecture {name!r} is not supported; known: {', '.join(FAMILIES)}"
        )
