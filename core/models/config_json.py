"""A model's configuration from config.json, as Hugging Face writes it: one struct a family."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from core.errors import ConfigError
from core.models.config import Latent, ModelConfig, Moe
from core.models.rope import ROPE_KINDS, RopeScaling, mscale

MOST_LAYERS = 4096
"""No model has more; they are counted before anything else is known."""


class _Rope(msgspec.Struct):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class _Quantisation(msgspec.Struct):
    quant_method: str = "unnamed"


class _Family(msgspec.Struct):
    """The fields of config.json that matter here, of any family; others are ignored."""

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
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    quantization_config: _Quantisation | None = None

    # What families differ in.

    def default_head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def biased(self) -> tuple[bool, bool]:
        """Of q, k and v; of the attention's output."""
        return self.attention_bias, self.attention_bias

    def normed_heads(self) -> bool:
        return False

    def windows(self, where: str) -> tuple[int, tuple[int, ...]]:
        """(tokens, layers that have that window)."""
        return 0, ()

    def moe(self, where: str) -> Moe | None:
        return None

    def latent(self) -> Latent | None:
        return None


class _Llama(_Family):
    pass


class _Windowed(_Family):
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: list[str] | None = None

    def windows(self, where: str) -> tuple[int, tuple[int, ...]]:
        size = self.sliding_window or 0
        if not self.use_sliding_window:
            return 0, ()
        if self.layer_types is None:
            return size, tuple(range(self.max_window_layers, self.num_hidden_layers))
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown or len(self.layer_types) != self.num_hidden_layers:
            raise ConfigError(
                f"{where}: layer_types must be full_attention or sliding_attention for each layer"
            )
        kinds = enumerate(self.layer_types)
        return size, tuple(n for n, kind in kinds if kind == "sliding_attention")


class _Qwen2(_Windowed):
    def biased(self) -> tuple[bool, bool]:
        return True, False


class _Qwen3(_Windowed):
    def default_head_dim(self) -> int:
        return 128

    def normed_heads(self) -> bool:
        return True


class _Qwen3Moe(_Family):
    use_sliding_window: bool = False
    sliding_window: int | None = None
    num_experts: int = 0
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None

    def normed_heads(self) -> bool:
        return True

    def windows(self, where: str) -> tuple[int, tuple[int, ...]]:
        if not self.use_sliding_window:
            return 0, ()
        return self.sliding_window or 0, tuple(range(self.num_hidden_layers))

    def moe(self, where: str) -> Moe | None:
        dense = set(self.mlp_only_layers or ())
        step = max(1, self.decoder_sparse_step)
        return Moe(
            layers=tuple(
                index
                for index in range(self.num_hidden_layers)
                if index not in dense and (index + 1) % step == 0
            ),
            count=self.num_experts or self.num_local_experts,
            chosen=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            normalised=self.norm_topk_prob,
        )


class _DeepSeekV3(_Family):
    kv_lora_rank: int = 0
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    rope_interleave: bool = True
    n_routed_experts: int = 0
    n_shared_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"

    def latent(self) -> Latent:
        return Latent(
            query_rank=self.q_lora_rank or 0,
            rank=self.kv_lora_rank,
            nope=self.qk_nope_head_dim,
            rope=self.qk_rope_head_dim,
            value=self.v_head_dim,
            interleaved=self.rope_interleave,
        )

    def moe(self, where: str) -> Moe | None:
        if (self.scoring_func, self.topk_method, self.moe_layer_freq) != ("sigmoid", "noaux_tc", 1):
            raise ConfigError(
                f"{where}: experts by {self.scoring_func!r} and {self.topk_method!r} in every "
                f"{self.moe_layer_freq}th layer are not supported; known: 'sigmoid' and 'noaux_tc' "
                "in every layer"
            )
        return Moe(
            layers=tuple(range(max(0, self.first_k_dense_replace), self.num_hidden_layers)),
            count=self.n_routed_experts,
            chosen=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            shared_width=(self.n_shared_experts or 0) * self.moe_intermediate_size,
            sigmoid=True,
            corrected=True,
            normalised=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            kept_groups=self.topk_group,
        )


_FAMILIES: dict[str, type[_Family]] = {
    "llama": _Llama,
    "qwen2": _Qwen2,
    "qwen3": _Qwen3,
    "qwen3_moe": _Qwen3Moe,
    "deepseek_v3": _DeepSeekV3,
}
JSON_FAMILIES = tuple(_FAMILIES)
"""Architectures, by the names that config.json gives them."""


def from_json(path: Path) -> ModelConfig:
    """Read config.json. Raises ConfigError."""
    where = str(path)
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise ConfigError(f"{path}: has no model_type")
    family = _FAMILIES.get(raw["model_type"])
    if family is None:
        raise ConfigError(
            f"{path}: architecture {raw['model_type']!r} is not supported; known: "
            f"{', '.join(JSON_FAMILIES)}"
        )
    try:
        read = msgspec.convert(raw, family)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    _refuse(read, where)
    rope = read.rope_parameters or read.rope_scaling or _Rope()
    latent = read.latent()
    qkv_bias, o_bias = read.biased()
    sliding_window, windowed = read.windows(where)
    head_dim = read.head_dim or read.default_head_dim()
    return ModelConfig(
        family=read.model_type,
        vocab_size=read.vocab_size,
        hidden=read.hidden_size,
        layers=read.num_hidden_layers,
        heads=read.num_attention_heads,
        kv_heads=1 if latent else read.num_key_value_heads or read.num_attention_heads,
        head_dim=latent.nope + latent.rope if latent else head_dim,
        intermediate=read.intermediate_size,
        context=read.max_position_embeddings,
        norm_eps=read.rms_norm_eps,
        rope_theta=rope.rope_theta or read.rope_theta or 10000.0,
        rope_scaling=_scaling(rope, read.max_position_embeddings, where),
        tied=read.tie_word_embeddings,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=read.mlp_bias,
        qk_norm=read.normed_heads(),
        sliding_window=sliding_window,
        windowed=windowed,
        moe=read.moe(where),
        latent=latent,
    )


def _refuse(read: _Family, where: str) -> None:
    for field, most in (("num_hidden_layers", MOST_LAYERS), ("num_attention_heads", None)):
        value: int = getattr(read, field)
        if value < 1 or (most is not None and value > most):
            raise ConfigError(f"{where}: {field} is {value}")
    if read.hidden_act != "silu":
        raise ConfigError(f"{where}: activation {read.hidden_act!r} is not supported, only silu")
    if read.quantization_config is not None:
        raise ConfigError(
            f"{where}: weights quantised by {read.quantization_config.quant_method!r} are not "
            "supported; known: plain F32, F16 and BF16"
        )
    rope = read.rope_parameters or read.rope_scaling or _Rope()
    part = rope.partial_rotary_factor or read.partial_rotary_factor or 1.0
    if part != 1:
        raise ConfigError(f"{where}: rotary embedding of a part of the head is not supported")


def _scaling(rope: _Rope, context: int, where: str) -> RopeScaling | None:
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"{where}: rope scaling {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}"
        )
    original = rope.original_max_position_embeddings or context
    if kind == "dynamic":
        original = context
    factor = rope.factor or (context / original if kind == "yarn" else 0.0)
    if factor <= 0:
        raise ConfigError(f"{where}: rope scaling {kind!r} needs a factor above 0")
    amplitude = 1.0
    if kind == "yarn":
        if rope.attention_factor is not None:
            amplitude = rope.attention_factor
        elif rope.mscale and rope.mscale_all_dim:
            amplitude = mscale(factor, rope.mscale) / mscale(factor, rope.mscale_all_dim)
        else:
            amplitude = mscale(factor)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=original,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        truncate=rope.truncate,
        amplitude=amplitude,
        mscale_all_dim=rope.mscale_all_dim or 0.0,
    )
