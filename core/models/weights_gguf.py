"""Weights of a GGUF file, under Hugging Face names and with canonical row order."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from core.errors import ConfigError
from core.models.config import ModelConfig
from core.models.config_gguf import from_gguf
from core.models.gguf import GGUFTensor, read_gguf
from core.models.quantised import Encoding, StoredTensor
from core.models.weights import Sampler

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class GGUFWeights:
    """A `WeightSource`."""

    def __init__(self, path: Path, context: int | None = None) -> None:
        self._path = path
        self._file = read_gguf(path)
        shapes = {name: tensor.shape for name, tensor in self._file.tensors.items()}
        config = from_gguf(self._file.metadata, shapes, str(path))
        self.config: ModelConfig = config.serving(context or config.context)
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in self._file.tensors.values():
            self._tensors[canonical_name(tensor.name)] = tensor

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def read(self, name: str) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{self._path}: has no tensor {name}")
        if tensor.type.name not in Encoding.__members__:
            known = ", ".join(Encoding.__members__)
            raise ConfigError(
                f"{self._path}: {tensor.name} is stored as {tensor.type.name}; supported: {known}"
            )
        data = torch.frombuffer(self._file.data(tensor.name), dtype=torch.uint8)
        rows = 1
        for size in tensor.shape[:-1]:
            rows *= size
        stored = StoredTensor(Encoding[tensor.type.name], tensor.shape, data.view(rows, -1))
        if self.config.permuted and "self_attn.q_proj" in name:
            return _unpermuted(stored, self.config.heads)
        if self.config.permuted and "self_attn.k_proj" in name:
            return _unpermuted(stored, self.config.kv_heads)
        return stored

    def digest(self) -> bytes:
        sampler = Sampler()
        for name, tensor in sorted(self._file.tensors.items()):
            label = f"{name} {tensor.type.name} {list(tensor.shape)}"
            sampler.add(label, self._file.data(name))
        return sampler.digest()

    def close(self) -> None:
        with suppress(BufferError):  # tensors in use keep the mapping; it goes with the last one
            self._file.close()


def canonical_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight of blk.3.attn_q.weight; unknown names stay."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    if layer is None:
        return f"{_TOP.get(part, part)}.{kind}"
    return f"model.layers.{layer}.{_IN_LAYER.get(part, part)}.{kind}"


def _unpermuted(stored: StoredTensor, heads: int) -> StoredTensor:
    """Rows of q or k, marked as being in pairs order; a bias is put in order at once."""
    if len(stored.shape) == 2:
        return replace(stored, pairs=heads)
    width = stored.encoding.block[1]
    values = StoredTensor(stored.encoding, (stored.shape[0], 1), stored.data.view(-1, width), heads)
    return replace(stored, data=values.in_order.reshape(1, -1))
