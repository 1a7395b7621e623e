"""Weights of a folder with config.json and safetensors files."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from core.errors import ConfigError
from core.models.config import ModelConfig
from core.models.config_json import from_json
from core.models.quantised import Encoding, StoredTensor
from core.models.safetensors import SafetensorsFolder
from core.models.weights import Sampler

_ENCODINGS = {"F32": Encoding.F32, "F16": Encoding.F16, "BF16": Encoding.BF16}


class SafetensorsWeights:
    """A `WeightSource`; names are those of the files."""

    def __init__(self, folder: Path, context: int | None = None) -> None:
        config = from_json(folder / "config.json")
        self.config: ModelConfig = config.serving(context or config.context)
        self._folder = folder
        self._files = SafetensorsFolder(folder)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files.tensors)

    def read(self, name: str) -> StoredTensor:
        tensor = self._files.tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{self._folder}: has no tensor {name}")
        encoding = _ENCODINGS.get(tensor.dtype)
        if encoding is None:
            raise ConfigError(f"{self._folder}: {name} is stored as {tensor.dtype}: not supported")
        expected = math.prod(tensor.shape) * encoding.block[1]
        if len(tensor.data) != expected:
            raise ConfigError(
                f"{self._folder}: {name} has {len(tensor.data)} bytes, not {expected}"
            )
        data = torch.frombuffer(tensor.data, dtype=torch.uint8)
        rows = math.prod(tensor.shape[:-1])
        return StoredTensor(encoding, tensor.shape, data.view(rows, -1))

    def digest(self) -> bytes:
        sampler = Sampler()
        for name, tensor in sorted(self._files.tensors.items()):
            sampler.add(f"{name} {tensor.dtype} {list(tensor.shape)}", tensor.data)
        return sampler.digest()

    def close(self) -> None:
        self._files.close()
