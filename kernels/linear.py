"""Weights as they are stored, and matrix products with them.

`Dense` keeps a weight in the compute dtype, `Int4` keeps blocks of 4 bits beside it and uses them
for few rows, where reading the weight is what costs. `cpu.native.StoredLinear` reads stored bytes
only, for any number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

INT4_ROWS = 8
"""Up to this many rows the 4-bit product is faster than the dense one."""
BLOCK_VALUES = 32
"""Weights in one block of Q8_0, Q4_0 and Q4_1."""


class Stored(Protocol):
    """A weight [rows, columns] as a file has it; a vector is one row."""

    @property
    def encoding(self) -> str:
        """F32, F16, BF16, Q8_0, Q4_0, Q4_1, or another that only `decode` understands."""
        ...

    @property
    def data(self) -> Tensor:
        """[rows, bytes of a row] uint8, perhaps of a mapped file."""
        ...

    @property
    def pairs(self) -> int:
        """0, or of how many heads the rows are stored in pairs order: within each of them,
        stored row 2·i + j is row i + j · (rows of a head / 2)."""
        ...

    @property
    def columns(self) -> int: ...

    def decode(self, out: Tensor) -> None:
        """Write the numbers into `out` [rows, columns], in order, rounded once to its dtype."""
        ...


class Linear(Protocol):
    """x [tokens, in] → [tokens, out]."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class Embedding(Protocol):
    """ids [tokens] int64 → [tokens, hidden]."""

    def __call__(self, ids: Tensor) -> Tensor: ...


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


class DenseEmbedding:
    """Rows of `weight` [vocabulary, hidden]."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, self.weight)


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


def decoded(parts: Sequence[Stored], dtype: torch.dtype) -> Tensor:
    """All rows of `parts`, one after another, as one matrix."""
    counts = [part.data.shape[0] for part in parts]
    weight = torch.empty((sum(counts), parts[0].columns), dtype=dtype)
    first = 0
    for part, count in zip(parts, counts, strict=True):
        part.decode(weight[first : first + count])
        first += count
    return weight


def in_order(part: Stored) -> Tensor:
    """`data` with its rows in order: itself, or a copy."""
    if not part.pairs:
        return part.data
    rows = part.data.shape[0]
    data = part.data.view(part.pairs, rows // part.pairs // 2, 2, -1)
    return data.transpose(1, 2).reshape(rows, -1)


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
