"""Rotary frequencies and the ways to stretch them over a longer context."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.errors import ConfigError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
"""By the names that config.json gives them."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`original_context`: of the training (for dynamic, the length from which on it stretches).

    - linear: all waves longer by `factor`.
    - llama3: waves above original_context / low_freq_factor are longer by `factor`, those below
      original_context / high_freq_factor stay, between them a blend.
    - yarn (Peng et al. 2023): the same by turns within the original context, from `beta_slow` to
      `beta_fast`; whole pairs only if `truncate`.
    - dynamic: the base grows with the length of the context that is served, `length`. Stored keys
      are turned by it, so one length holds for all sequences; transformers changes it with the
      sequence, which agrees up to original_context and at `length` itself.

    Scores of rotated parts are times `amplitude`² (yarn's attention factor); `mscale_all_dim` is
    DeepSeek's, for all parts.
    """

    kind: str
    factor: float
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    mscale_all_dim: float = 0.0
    length: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for what no frequencies can be made of."""
        above_0 = [self.factor, self.beta_fast, self.beta_slow, self.amplitude]
        above_0 += [self.low_freq_factor, self.high_freq_factor]
        above_0 += [self.original_context] if self.kind != "linear" else []
        if not all(0 < value < math.inf for value in above_0):
            raise ConfigError(f"rope scaling has a number that is not above 0: {self}")
        if not 0 <= self.mscale_all_dim < math.inf:
            raise ConfigError(f"rope scaling has mscale_all_dim {self.mscale_all_dim}")


def inverse_frequencies(theta: float, dim: int, scaling: RopeScaling | None) -> list[float]:
    """One per rotary pair of `dim` values."""
    if scaling is not None and scaling.kind == "dynamic":
        theta = _dynamic_theta(theta, dim, scaling)
    half = dim // 2
    plain = [theta ** (-i / half) for i in range(half)]
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return [value / scaling.factor for value in plain]
    if scaling.kind == "llama3":
        return [_llama3(value, scaling) for value in plain]
    return _yarn(plain, theta, scaling)


def mscale(factor: float, weight: float = 1.0) -> float:
    """Yarn's growth of the amplitude with the stretching factor."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _dynamic_theta(theta: float, dim: int, scaling: RopeScaling) -> float:
    longer = max(scaling.length, scaling.original_context) / scaling.original_context
    grown = scaling.factor * longer - (scaling.factor - 1)
    return float(theta * grown ** (dim / (dim - 2)))


def _llama3(frequency: float, scaling: RopeScaling) -> float:
    turns = scaling.original_context * frequency / (2 * math.pi)
    if turns <= scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns >= scaling.high_freq_factor:
        return frequency
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return frequency * (kept + (1 - kept) / scaling.factor)


def _yarn(plain: list[float], theta: float, scaling: RopeScaling) -> list[float]:
    def pair(turns: float) -> float:
        """The pair that makes so many turns within the original context."""
        return len(plain) * math.log(scaling.original_context / (turns * 2 * math.pi)) / log_theta

    log_theta = math.log(theta)
    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(plain) - 1)
    width = high - low or 0.001
    found = []
    for index, value in enumerate(plain):
        stretched = min(max((index - low) / width, 0.0), 1.0)
        found.append(value * (1 - stretched) + value / scaling.factor * stretched)
    return found
