"""The experts of a mixture: each token through its own few, rows of one expert together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.gated import silu_mul
from kernels.grouped_matmul import grouped_matmul
from kernels.linear import Stored


class Experts(Protocol):
    """Σ_i weights[t, i] · expert[ids[t, i]](x[t]), an expert being down(silu(gate) · up)."""

    @property
    def count(self) -> int: ...

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, hidden], ids [tokens, k] int64 from 0 to `count`, weights [tokens, k] fp32 →
        [tokens, hidden]. tokens may be 0."""
        ...


@dataclass(frozen=True, slots=True)
class Sorted:
    """(token, choice) pairs in the order of their experts: `order` [pairs] int64, and where each
    expert's run begins, `offsets` [experts + 1] int32. Stays on the device."""

    order: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, ids: Tensor, experts: int) -> Sorted:
        flat, order = ids.flatten().sort(stable=True)
        bounds = torch.arange(experts + 1, device=ids.device)
        return cls(order, torch.searchsorted(flat, bounds).int())


def joined(mixed: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Rows of the pairs in `order` → [tokens, hidden], summed with `weights` in fp32."""
    tokens, chosen = weights.shape
    pairs = torch.empty_like(mixed)
    pairs[order] = mixed
    wide = pairs.view(tokens, chosen, mixed.shape[-1]).float() * weights.unsqueeze(-1)
    return wide.sum(1).to(mixed.dtype)


class DenseExperts:
    """gate_up [experts, 2 · width, hidden], gate first, and down [experts, hidden, width], in the
    compute dtype."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        self.gate_up = gate_up
        self.down = down

    @property
    def count(self) -> int:
        return self.gate_up.shape[0]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        pairs = Sorted.of(ids, self.count)
        taken = x[pairs.order // ids.shape[1]]
        inner = self._gated(self._grouped(taken, self.gate_up, pairs.offsets))
        return joined(self._grouped(inner, self.down, pairs.offsets), pairs.order, weights)

    # Another backend gives its own two operations.

    @staticmethod
    def _gated(gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    @staticmethod
    def _grouped(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        return grouped_matmul(x, weights, offsets)


def stacked(
    experts: Sequence[Sequence[Stored]], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """[experts, rows, columns]: the rows of each expert's parts, one after another. On the host
    there is never more than one part beside the result."""
    first = experts[0]
    rows = sum(part.data.shape[0] for part in first)
    out = torch.empty((len(experts), rows, first[0].columns), dtype=dtype, device=device)
    for target, parts in zip(out, experts, strict=True):
        at = 0
        for part in parts:
            place = target[at : at + part.data.shape[0]]
            at += part.data.shape[0]
            if out.device.type == "cpu":
                part.decode(place)
            else:
                numbers = torch.empty(place.shape, dtype=dtype)
                part.decode(numbers)
                place.copy_(numbers)
    return out
