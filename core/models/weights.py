"""Where weights come from: stored tensors under Hugging Face names, rows in canonical order.

`open_weights` picks the container by the path. A source maps its file and copies nothing: a tensor
is a view of the file, whose pages all ranks of a machine share.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import msgspec

from core.models.config import ModelConfig
from core.models.quantised import StoredTensor
from core.types import BLOCK_TOKENS

SAMPLE_BYTES = 4096
"""Bytes at either end of each tensor that identify the weights: a model of 100 GB must not be
read whole to be known."""


class WeightSource(Protocol):
    """Stored weights of one model."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> StoredTensor:
        """Raises ConfigError when the tensor is missing or stored in an unknown form."""
        ...

    def digest(self) -> bytes:
        """16 bytes that name these weights, by shapes and samples of their bytes; the same
        wherever the files lie."""
        ...

    def close(self) -> None:
        """Read no more. Tensors that were read stay good: they keep the files mapped."""
        ...


def open_weights(path: Path, context: int | None = None) -> WeightSource:
    """A GGUF file, or a folder with config.json and safetensors. `context`: tokens that will be
    served, None: as many as the model says. Raises ConfigError."""
    if path.is_dir():
        from core.models.weights_safetensors import SafetensorsWeights

        return SafetensorsWeights(path, context)
    from core.models.weights_gguf import GGUFWeights

    return GGUFWeights(path, context)


def fingerprint(source: WeightSource, kv_dtype: str) -> bytes:
    """16 bytes that two ranks share exactly when their KV blocks are interchangeable: weights,
    configuration (rope included), KV dtype and block size."""
    parts = (
        source.digest(),
        msgspec.json.encode(replace(source.config, context=1), order="deterministic"),
        kv_dtype.encode(),
        str(BLOCK_TOKENS).encode(),
    )
    state = blake2b(digest_size=16, person=b"skerry-model-1")
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()


class Sampler:
    """Digest of named byte ranges, in the order given."""

    def __init__(self) -> None:
        self._state = blake2b(digest_size=16, person=b"skerry-weights1")

    def add(self, label: str, data: memoryview) -> None:
        ends = data if len(data) <= 2 * SAMPLE_BYTES else None
        head = f"{label}\0{len(data)}\0".encode()
        self._state.update(head)
        if ends is not None:
            self._state.update(ends)
        else:
            self._state.update(data[:SAMPLE_BYTES])
            self._state.update(data[-SAMPLE_BYTES:])

    def digest(self) -> bytes:
        return self._state.digest()
