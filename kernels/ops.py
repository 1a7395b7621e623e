"""The one place that decides which implementation of each operation runs on a device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.cpu.build import library_path
from kernels.cpu.native import NativeOps
from kernels.experts import DenseExperts, Experts, stacked
from kernels.layers import Layer, Layers, Shape
from kernels.linear import (
    Dense,
    DenseEmbedding,
    Embedding,
    Int4,
    Linear,
    Stored,
    decoded,
    in_order,
)
from kernels.rms_norm import rms_norm
from kernels.stepwise import TorchLayers

_log = logging.getLogger("skerry.kernels")


class Ops(Protocol):
    """What a decoder is made of. It turns stored weights into what it computes with, and keeps
    what it needs of them alive."""

    @property
    def dtype(self) -> torch.dtype:
        """Of KV, and the precision that is asked for."""
        ...

    def placed(self, numbers: Tensor) -> Tensor:
        """`numbers` where the others are."""
        ...

    def vector(self, stored: Stored) -> Tensor:
        """A vector for `rms_norm`, `layers` or a bias."""
        ...

    def matrix(self, parts: Sequence[Stored], *, exact: bool = False) -> Tensor:
        """The numbers of all rows of `parts`, in the precision of activations; fp32 if `exact`."""
        ...

    def linear(self, parts: Sequence[Stored], bias: Tensor | None) -> Linear:
        """One product with all rows of `parts`, in order."""
        ...

    def embedding(self, stored: Stored) -> Embedding: ...

    def experts(
        self, gate_up: Sequence[Sequence[Stored]], down: Sequence[Sequence[Stored]]
    ) -> Experts:
        """For each expert the parts of its two products, gate first."""
        ...

    def layers(self, layers: Sequence[Layer], shape: Shape) -> Layers:
        """`layers` made of this object's vectors and products."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See kernels.rms_norm."""
        ...


class TorchOps:
    """The references: any device, any dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._tables: dict[int, tuple[Stored, Tensor]] = {}

    def placed(self, numbers: Tensor) -> Tensor:
        return numbers

    def vector(self, stored: Stored) -> Tensor:
        return decoded([stored], self.dtype)[0]

    def linear(self, parts: Sequence[Stored], bias: Tensor | None) -> Linear:
        dense = Dense(self._matrix(parts), bias)
        encodings = {part.encoding for part in parts}
        if len(encodings) == 1 and Int4.fits(dense, parts[0].encoding):
            return Int4(dense, parts[0].encoding, torch.cat([in_order(part) for part in parts]))
        return dense

    def matrix(self, parts: Sequence[Stored], *, exact: bool = False) -> Tensor:
        return decoded(parts, torch.float32 if exact else self.dtype)

    def experts(
        self, gate_up: Sequence[Sequence[Stored]], down: Sequence[Sequence[Stored]]
    ) -> Experts:
        return DenseExperts(stacked(gate_up, self.dtype), stacked(down, self.dtype))

    def embedding(self, stored: Stored) -> Embedding:
        weight = decoded([stored], self.dtype)
        self._tables[id(stored)] = (stored, weight)
        return DenseEmbedding(weight)

    def layers(self, layers: Sequence[Layer], shape: Shape) -> Layers:
        return TorchLayers(layers, shape)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def _matrix(self, parts: Sequence[Stored]) -> Tensor:
        """A head that is tied to the embedding shares its numbers."""
        if len(parts) == 1 and id(parts[0]) in self._tables:
            return self._tables[id(parts[0])][1]
        return decoded(parts, self.dtype)


def select(
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    native: bool = True,
    threads: int = 1,
    columns: Sequence[int] = (),
) -> Ops:
    """The fastest operations for `device` that this installation has. `native` False: only
    PyTorch. `columns`: of the weights that will be multiplied with. On a GPU the Triton kernels,
    which this installation must have: ImportError else."""
    if device == "cuda":
        from kernels.triton.ops import TritonOps  # triton is there on Linux with x86-64 only

        return TritonOps(dtype, device)
    library = library_path()
    if device == "cpu" and native and library.exists() and NativeOps.fits(columns):
        try:
            return NativeOps(library, dtype, threads=threads)
        except OSError as error:
            _log.warning("native kernels cannot be loaded, PyTorch is used instead: %s", error)
    return TorchOps(dtype)
