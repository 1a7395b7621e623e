"""The weights that one rank keeps: a source that shows a smaller model than the one it reads.

Split by rows: q, k, v, gate, up and the vocabulary; by columns: what follows them (o, down), whose
products are then partial sums. The rest is the same on every rank. Nothing of the file is read but
what is kept. Whoever builds a model from such a source need not know of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch

from core.models.config import ModelConfig
from core.models.parallel import Shard
from core.models.quantised import Encoding, StoredTensor
from core.models.weights import WeightSource

_IN_LAYER = re.compile(r"model\.layers\.\d+\.(?P<part>.+)\.(?P<kind>weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.\d+\.(\w+)")

Rule = Callable[[StoredTensor], StoredTensor]


class ShardedSource:
    """A `WeightSource` of the part of `source` that `shard` names. Layers keep their numbers."""

    def __init__(self, source: WeightSource, shard: Shard) -> None:
        self.config = local_config(source.config, shard)
        self._source = source
        self._shard = shard
        whole = source.config
        latent = whole.latent
        value = whole.head_dim if latent is None else latent.value
        unfold = 0 if latent is None else latent.nope + latent.value
        self._rows = {
            "self_attn.q_proj": times(shard.heads, whole.head_dim),
            "self_attn.q_b_proj": times(shard.heads, whole.head_dim),
            "self_attn.k_proj": times(shard.kv_heads, whole.head_dim),
            "self_attn.v_proj": times(shard.kv_heads, whole.head_dim),
            "self_attn.kv_b_proj": times(shard.heads, unfold),
            "mlp.gate_proj": shard.columns,
            "mlp.up_proj": shard.columns,
            "mlp.experts.gate_proj": shard.expert_columns,
            "mlp.experts.up_proj": shard.expert_columns,
            "mlp.shared_experts.gate_proj": shard.shared,
            "mlp.shared_experts.up_proj": shard.shared,
        }
        self._columns = {
            "self_attn.o_proj": times(shard.heads, value),
            "mlp.down_proj": shard.columns,
            "mlp.experts.down_proj": shard.expert_columns,
            "mlp.shared_experts.down_proj": shard.shared,
        }

    @property
    def names(self) -> frozenset[str]:
        return self._source.names

    def read(self, name: str) -> StoredTensor:
        stored = self._source.read(name)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return cut(stored, 0, self._shard.vocabulary)
        match = _IN_LAYER.fullmatch(name)
        if match is None:
            return stored
        part = _EXPERT.sub(r"mlp.experts.\1", match["part"])
        if part in self._rows:
            return cut(stored, 0, self._rows[part])
        if part not in self._columns:
            return stored
        if match["kind"] == "weight":
            return cut(stored, 1, self._columns[part])
        # a bias that is added to every rank's partial sum would count several times
        return stored if self._shard.place.tp_rank == 0 else _zeros(stored)

    def digest(self) -> bytes:
        return self._source.digest()

    def close(self) -> None:
        self._source.close()


def local_config(whole: ModelConfig, shard: Shard) -> ModelConfig:
    """The model as its builder is to see it on this rank; all layers are still counted."""
    moe = whole.moe
    return replace(
        whole,
        vocab_size=len(shard.vocabulary),
        heads=len(shard.heads),
        kv_heads=len(shard.kv_heads),
        intermediate=len(shard.columns),
        moe=moe and replace(moe, width=len(shard.expert_columns), shared_width=len(shard.shared)),
    )


def times(numbers: range, size: int) -> range:
    """The rows of things of `size` rows each."""
    return range(numbers.start * size, numbers.stop * size)


def cut(stored: StoredTensor, axis: int, kept: range) -> StoredTensor:
    """A view of the file where the cut falls between blocks of the encoding; else the numbers."""
    values = stored.encoding.block[0]
    if axis == 0 or not (kept.start % values or kept.stop % values):
        return stored.narrow(axis, kept.start, kept.stop)
    numbers = stored.numbers(torch.float32)[:, kept.start : kept.stop].contiguous()
    return StoredTensor(Encoding.F32, tuple(numbers.shape), numbers.view(torch.uint8))


def _zeros(stored: StoredTensor) -> StoredTensor:
    numbers = torch.zeros(1, stored.columns)
    return StoredTensor(Encoding.F32, stored.shape, numbers.view(torch.uint8))
