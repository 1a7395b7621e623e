"""Reads parts of a model: several stored matrices into one product, shapes checked by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.errors import ConfigError
from core.models.config import ModelConfig
from core.models.quantised import StoredTensor
from core.models.resident import bring_in
from core.models.weights import WeightSource
from kernels.layers import GatedMlp
from kernels.linear import Linear
from kernels.ops import Ops


class Reader:
    """What is read is made for `ops`. Every method raises ConfigError for a tensor that is missing
    or has another shape."""

    def __init__(self, source: WeightSource, ops: Ops) -> None:
        self.source = source
        self.ops = ops

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self.source.read(name)
        if stored.shape != shape:
            raise ConfigError(
                f"tensor {name} has the shape {list(stored.shape)}, expected {list(shape)}"
            )
        bring_in(stored.data)
        return stored

    def vector(self, name: str, length: int) -> Tensor:
        return self.ops.vector(self.stored(name, (length,)))

    def linear(
        self, names: Sequence[str], columns: int, rows: Sequence[int], *, bias: bool
    ) -> Linear:
        """One product with all rows of `names`, in order."""
        parts = [
            self.stored(f"{name}.weight", (count, columns))
            for name, count in zip(names, rows, strict=True)
        ]
        return self.product(parts, names, bias=bias)

    def product(self, parts: Sequence[StoredTensor], names: Sequence[str], *, bias: bool) -> Linear:
        """`parts` are the weights of `names`, whose biases are read beside them."""
        if not bias:
            return self.ops.linear(parts, None)
        values = [
            self.vector(f"{name}.bias", part.shape[0])
            for name, part in zip(names, parts, strict=True)
        ]
        return self.ops.linear(parts, torch.cat(values))

    def gated(self, name: str, width: int, *, bias: bool) -> GatedMlp:
        hidden = self.config.hidden
        return GatedMlp(
            gate_up=self.linear(
                (f"{name}.gate_proj", f"{name}.up_proj"), hidden, (width, width), bias=bias
            ),
            down=self.linear((f"{name}.down_proj",), width, (hidden,), bias=bias),
        )
