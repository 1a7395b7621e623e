"""Stored weights: bytes with an encoding, and their numbers.

Encodings are those of GGUF files. A row is a whole number of blocks, so rows can be reordered
and split without decoding; block layouts are given at each function (little endian, d and m fp16).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from core.errors import ConfigError


class Encoding(StrEnum):
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q6_K = "Q6_K"

    @property
    def block(self) -> tuple[int, int]:
        """(values, bytes) of one block."""
        return _BLOCKS[self]


_BLOCKS = {
    Encoding.F32: (1, 4),
    Encoding.F16: (1, 2),
    Encoding.BF16: (1, 2),
    Encoding.Q8_0: (32, 34),
    Encoding.Q4_0: (32, 18),
    Encoding.Q4_1: (32, 20),
    Encoding.Q6_K: (256, 210),
}
_PLAIN = {
    Encoding.F32: torch.float32,
    Encoding.F16: torch.float16,
    Encoding.BF16: torch.bfloat16,
}
_TILE = 1 << 18
"""Values decoded at a time: intermediate results stay in the cache."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`data` [rows, bytes of a row] uint8; a vector is one row. May be a view of a mapped file,
    which stays mapped as long as the view: do not write to it.

    `pairs`: 0, or of how many heads the rows are stored in pairs order (GGUF's for q and k):
    within each head, stored row 2·i + j is row i + j · (head size / 2).
    """

    encoding: Encoding
    shape: tuple[int, ...]
    data: Tensor
    pairs: int = 0

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def in_order(self) -> Tensor:
        """`data` with its rows in order: itself, or a copy."""
        if not self.pairs:
            return self.data
        rows = self.data.shape[0]
        data = self.data.view(self.pairs, rows // self.pairs // 2, 2, -1)
        return data.transpose(1, 2).reshape(rows, -1)

    def narrow(self, axis: int, first: int, last: int) -> StoredTensor:
        """A view of [first, last) along `axis` of a matrix or vector: nothing is read.

        Raises ConfigError where that would cut a block of the encoding, or a head whose rows are
        stored in pairs order.
        """
        size = self.shape[axis]
        shape = tuple(last - first if at == axis else n for at, n in enumerate(self.shape))
        if not 0 <= first <= last <= size or len(shape) > 2:
            raise ConfigError(f"[{first}, {last}) is no part of axis {axis} of {list(self.shape)}")
        if axis == len(shape) - 1:
            values, nbytes = self.encoding.block
            if first % values or last % values:
                raise ConfigError(
                    f"columns [{first}, {last}) of {self.encoding} cut blocks of {values} values"
                )
            data = self.data[:, first // values * nbytes : last // values * nbytes]
            return replace(self, shape=shape, data=data)
        head = size // self.pairs if self.pairs else 1
        if first % head or last % head:
            raise ConfigError(f"rows [{first}, {last}) cut heads of {head} rows")
        pairs = (last - first) // head if self.pairs else 0
        return replace(self, shape=shape, data=self.data[first:last], pairs=pairs)

    def take(self, rows: Tensor) -> StoredTensor:
        """A copy of the numbered rows of a matrix, or numbers of a vector, in their order."""
        shape = (len(rows), *self.shape[1:])
        if len(shape) == 1:
            width = self.encoding.block[1]
            data = self.in_order.view(-1, width).index_select(0, rows).view(1, -1)
        else:
            data = self.in_order.index_select(0, rows)
        return replace(self, shape=shape, data=data, pairs=0)

    def decode(self, out: Tensor) -> None:
        """Write the numbers into `out`, of the same shape, rounded once to its dtype."""
        data = self.in_order
        out = out.view(data.shape[0], self.columns)
        plain = _PLAIN.get(self.encoding)
        if plain is not None:
            out.copy_(data.contiguous().view(plain))
            return
        step = max(1, _TILE // self.columns)
        block_bytes = self.encoding.block[1]
        decode = _DECODERS[self.encoding]
        for first in range(0, out.shape[0], step):
            part = out[first : first + step]
            blocks = data[first : first + step].reshape(-1, block_bytes)
            part.copy_(decode(blocks).view(part.shape))

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """A new tensor of the stored numbers."""
        out = torch.empty(self.shape, dtype=dtype)
        self.decode(out)
        return out


def _halves(blocks: Tensor, start: int, count: int) -> Tensor:
    """fp16 numbers at byte `start` of each block, as fp32 [blocks, count]."""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).float()


def _split(packed: Tensor) -> Tensor:
    """16 bytes → 32 nibbles: first all low halves, then all high ones."""
    out = torch.empty((packed.shape[0], 2, 16), dtype=torch.uint8)
    torch.bitwise_and(packed, 15, out=out[:, 0])
    torch.bitwise_right_shift(packed, 4, out=out[:, 1])
    return out.view(-1, 32)


def _q8_0(blocks: Tensor) -> Tensor:
    """d, 32 × int8: d · q."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks, 0, 1))


def _q4_0(blocks: Tensor) -> Tensor:
    """d, 16 bytes: d · (q − 8)."""
    return _split(blocks[:, 2:]).float().sub_(8).mul_(_halves(blocks, 0, 1))


def _q4_1(blocks: Tensor) -> Tensor:
    """d, m, 16 bytes: d · q + m."""
    grid = _halves(blocks, 0, 2)
    return _split(blocks[:, 4:]).float().mul_(grid[:, :1]).add_(grid[:, 1:])


def _q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 × int8 scale, d: d · scale · (q − 32).

    In each half of 128 values, value 32·j + l has its low bits in byte 32·(j mod 2) + l, the high
    nibble for j ≥ 2, and its high bits in byte l at bit 2·j. A scale covers 16 values.
    """
    count = blocks.shape[0]
    low = blocks[:, :128].reshape(count, 2, 2, 32)
    low = torch.stack((low & 15, low >> 4), 2).view(count, 2, 4, 32)
    high = blocks[:, 128:192].reshape(count, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    values = (low | (((high >> shifts) & 3) << 4)).view(count, 16, 16).float().sub_(32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    grid = scales * _halves(blocks, 208, 1)
    return values.mul_(grid.unsqueeze(-1)).view(count, 256)


_DECODERS: dict[Encoding, Callable[[Tensor], Tensor]] = {
    Encoding.Q8_0: _q8_0,
    Encoding.Q4_0: _q4_0,
    Encoding.Q4_1: _q4_1,
    Encoding.Q6_K: _q6_k,
}
