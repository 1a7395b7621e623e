"""What a decoder-only model is, in one frozen form, whatever file it was read from.

Every number is checked here; `config_json` and `config_gguf` refuse by name (ConfigError) what the
decoder cannot compute, before any weight is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from core.errors import ConfigError
from core.models.rope import RopeScaling, inverse_frequencies, mscale


@dataclass(frozen=True, slots=True)
class Moe:
    """Layers whose MLP is a mixture: of `count` experts of `width` a token passes `chosen`, and one
    of `shared_width` (0: none) as well. The rest says how they are chosen: kernels.routing."""

    layers: tuple[int, ...]
    count: int
    chosen: int
    width: int
    shared_width: int = 0
    sigmoid: bool = False
    corrected: bool = False
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1

    def __post_init__(self) -> None:
        sizes = (self.count, self.chosen, self.width, self.groups, self.kept_groups)
        if min(sizes) < 1 or self.shared_width < 0 or not 0 < self.scale < math.inf:
            raise ConfigError(f"the model's mixture of experts has a size below 1: {self}")
        if self.count % self.groups or self.kept_groups > self.groups:
            raise ConfigError(
                f"{self.count} experts in {self.groups} groups of which {self.kept_groups} count: "
                "these do not fit"
            )
        if self.chosen > self.count // self.groups * self.kept_groups:
            raise ConfigError(
                f"{self.chosen} experts a token, but only "
                f"{self.count // self.groups * self.kept_groups} to choose from"
            )


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of latent attention: of the query's compressed form (0: it has none), the cached
    latent, and of each head's unrotated and rotated key and its value. `interleaved`: rotated rows
    are stored as pairs (0, 1), (2, 3), …"""

    query_rank: int
    rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool = True

    def __post_init__(self) -> None:
        if self.query_rank < 0 or min(self.rank, self.nope, self.rope, self.value) < 1:
            raise ConfigError(f"the model's latent attention has a size below 1: {self}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`context`: tokens that are served, at first those that the file names.
    `rope_stored`: the file holds divisors of the rotary frequencies as a tensor (GGUF).
    `permuted`: q and k rows are stored in pairs order and must be put back. Of `windowed` layers
    a token sees the last `sliding_window` positions. `intermediate` is the width of gated MLPs.
    With `latent`, `kv_heads` is 1 and `head_dim` a head's whole key."""

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
    qk_norm: bool = False
    permuted: bool = False
    sliding_window: int = 0
    windowed: tuple[int, ...] = ()
    moe: Moe | None = None
    latent: Latent | None = None

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
        if not 1 < self.rope_theta < math.inf or not 0 <= self.norm_eps < 1:
            raise ConfigError(
                f"the model's rope_theta is {self.rope_theta}, its norm_eps {self.norm_eps}"
            )
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "dynamic" and self.rotary_dim < 4:
            raise ConfigError(f"dynamic rope over {self.rotary_dim} values has no pair to stretch")
        if self.rotary_dim % 2:
            raise ConfigError(f"head size {self.rotary_dim} is odd: no rotary pairs")
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

    @property
    def kv_shape(self) -> tuple[int, int]:
        """(heads, dim) of what is kept of a token in one layer, of K and of V or of latents."""
        if self.latent is not None:
            return 1, self.latent.rank + self.latent.rope
        return self.kv_heads, self.head_dim

    @property
    def columns(self) -> tuple[int, ...]:
        """Of the weights that are multiplied with, without those that are small."""
        found = {self.hidden}
        if self.moe is None or len(self.moe.layers) < self.layers:
            found.add(self.intermediate)
        if self.moe is not None:
            found |= {self.moe.width, self.moe.shared_width or self.moe.width}
        if self.latent is None:
            found.add(self.heads * self.head_dim)
        else:
            found |= {self.heads * self.latent.value, self.latent.query_rank or self.hidden}
        return tuple(sorted(found))

    @property
    def rotary_dim(self) -> int:
        """Values of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rope

    @property
    def rotary_scale(self) -> float:
        """What scores of rotated parts are times, beside the rest."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.amplitude**2

    @property
    def attention_scale(self) -> float:
        """What scores are times. It holds yarn's attention factor, so that stored keys do not."""
        scale = 1 / math.sqrt(self.head_dim)
        scaling = self.rope_scaling
        if self.latent is None:
            return scale * self.rotary_scale
        if scaling is not None and scaling.mscale_all_dim:
            scale *= mscale(scaling.factor, scaling.mscale_all_dim) ** 2
        return scale

    @property
    def context_limit(self) -> int:
        """The most tokens that may be served."""
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "dynamic":
            return int(scaling.original_context * max(1.0, scaling.factor))
        return self.context

    def serving(self, context: int) -> ModelConfig:
        """For sequences of up to `context` tokens. Raises ConfigError when it is too long."""
        limit, scaling = self.context_limit, self.rope_scaling
        if context > limit:
            raise ConfigError(f"context {context} is above the model's own limit of {limit} tokens")
        if scaling is not None and scaling.kind == "dynamic":
            scaling = replace(scaling, length=max(context, scaling.original_context))
        return replace(self, context=context, rope_scaling=scaling)

    def inverse_frequencies(self, stored: tuple[float, ...] | None = None) -> list[float]:
        """One per rotary pair, scaled. `stored`: the divisors of a `rope_stored` file."""
        if stored is None:
            return inverse_frequencies(self.rope_theta, self.rotary_dim, self.rope_scaling)
        plain = inverse_frequencies(self.rope_theta, self.rotary_dim, None)
        return [value / divisor for value, divisor in zip(plain, stored, strict=True)]
