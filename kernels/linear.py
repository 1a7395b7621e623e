"""Matrix products with a weight, in the form that the weight is kept in.

`Dense` keeps the weight in the compute dtype. Others keep blocks of 4 or 8 bits beside it and use
them for few rows, where reading the weight is what costs: `Int4` here, `cpu.native.BlockLinear`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

INT4_ROWS = 8
"""Up to this many rows the 4-bit product is faster than the dense one."""
BLOCK_VALUES = 32
"""Weights in one block of every encoding below."""
BLOCK_ENCODINGS = {"Q8_0": 0, "Q4_0": 1, "Q4_1": 2}
"""What native products read; the numbers are theirs."""


class Linear(Protocol):
    """x [tokens, in] → [tokens, out]."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class Dense:
    """weight [out, in], bias [out] or None, both in the compute dtype."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Int4:
    """A dense weight and 4-bit blocks of the same numbers, by PyTorch's own 4-bit product.

    `blocks` [out, bytes of a row]: blocks of 32 in GGUF's form. The product rounds each block's
    scale and zero to bf16.
    """

    __slots__ = ("dense", "grid", "packed")

    def __init__(self, dense: Dense, encoding: str, blocks: Tensor) -> None:
        self.dense = dense
        values, scales, zeros = nibbles(encoding, blocks)
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 2)
        # The operator computes (nibble − 8) · scale + zero.
        pairs = torch.stack((scales, zeros + 8 * scales), -1)
        self.grid = pairs.transpose(0, 1).contiguous().to(torch.bfloat16)

    @staticmethod
    def fits(dense: Dense, encoding: str) -> bool:
        return (
            encoding in ("Q4_0", "Q4_1")
            and dense.bias is None
            and dense.weight.dtype == torch.bfloat16
            and dense.weight.device.type == "cpu"
            and dense.shape[0] % 64 == 0
            and dense.shape[1] % BLOCK_VALUES == 0
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self.dense.shape

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > INT4_ROWS:
            return self.dense(x)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self.packed, BLOCK_VALUES, self.grid
        )
        return product


def nibbles(encoding: str, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of Q4_0 or Q4_1: (nibbles [rows, columns] uint8, scales, zeros [rows, columns/32] fp32),
    value = nibble · scale + zero."""
    rows = blocks.shape[0]
    header = {"Q4_0": 2, "Q4_1": 4}[encoding]
    blocks = blocks.reshape(-1, header + 16)
    packed = blocks[:, header:]
    values = torch.stack((packed & 15, packed >> 4), 1).view(rows, -1)
    grid = blocks[:, :header].contiguous().view(torch.float16).float()
    scales = grid[:, 0].reshape(rows, -1)
    zeros = grid[:, 1].reshape(rows, -1) if header == 4 else scales * -8.0
    return values, scales, zeros
