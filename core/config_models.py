"""The part of a topology that says which models there are."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from core.config_tenants import Price
from core.config_types import Amount, Positive
from core.parallel import ModelNumbers

_Digest = Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}$")]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Scripted(_Section, frozen=True):
    step_ms: Amount = 0.0
    prefill_tokens_per_s: Amount = 0.0
    repeat: bool = False
    block_bytes: Positive = 4096
    layers: Positive = 1
    kv_heads: Positive = 1
    """What plans can split: each layer and head has its share of a block."""

    @property
    def numbers(self) -> ModelNumbers:
        """As if it were a model."""
        many = 1 << 16
        return ModelNumbers(self.layers, 12 * self.kv_heads, self.kv_heads, many, many)


class Model(_Section, frozen=True):
    source: str
    """`package:NAME` (a Python package that carries one GGUF file) or a path to a GGUF file or a
    folder of safetensors; relative paths start at the topology file."""
    digest: _Digest | None = None
    """Of the GGUF file, or of a folder's files (`skerry models add` prints it): what is served is
    compared with it before a rollout begins."""
    aliases: tuple[str, ...] = ()
    context: Positive | None = None
    """Tokens of prompt and answer together; the model's own limit when absent."""
    engine: Literal["torch", "scripted"] = "torch"
    """torch, or scripted: no weights, plays the prompt back (rehearsals and fault tests)."""
    scripted: Scripted | None = None
    residency: tuple[str, ...] = ()
    """The regions that may see its prompts; all when empty."""
    price: Price | None = None
