"""The operations of `kernels.ops.Ops` in native code, for fp32 and bf16 on the CPU.

A call passes plain addresses: about two microseconds instead of five to ten for each of the
several PyTorch operations that it replaces. Prompt chunks still attend by PyTorch's matrix
products, which are the fastest there.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from kernels.linear import BLOCK_ENCODINGS, BLOCK_VALUES, Dense, Linear
from kernels.paged_attention import PagedRows, prompt_rows

BLOCK_ROWS = 8
"""Up to this many rows a product with 4- or 8-bit blocks beats the dense one."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_SHAPE = ctypes.c_int64 * 7
_int, _long, _float, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_SIGNATURES = {
    "skerry_add_rms_norm": (
        _int, _long, _long, _pointer, _pointer, _pointer, _float, _pointer, _int,
    ),
    "skerry_silu_mul": (_int, _long, _long, _pointer, _pointer, _int),
    "skerry_rotate_and_write": (
        _int, _SHAPE, _long, _pointer, _pointer, _pointer, _pointer, _pointer, _int,
    ),
    "skerry_decode": (
        _int, _SHAPE, _long, _pointer, _pointer, _pointer, _long, _pointer, _float, _pointer, _int,
    ),
    "skerry_block_linear": (_int, _long, _long, _long, _pointer, _pointer, _pointer, _int),
}  # fmt: skip


class NativeOps:
    """All tensors are contiguous, on the CPU, and of the dtypes above (no other comes from a
    runner on the CPU)."""

    def __init__(self, library: Path, *, threads: int) -> None:
        """Raises OSError when the library cannot be loaded."""
        self._library = ctypes.CDLL(str(library))
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes = arguments
            function.restype = None
        self._threads = threads

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(None, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x.data_ptr(), residual, weight, eps)

    def _norm(self, x: int | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(residual)
        self._library.skerry_add_rms_norm(
            _DTYPES[out.dtype], out.shape[0], out.shape[1], x, residual.data_ptr(),
            weight.data_ptr(), eps, out.data_ptr(), self._threads,
        )  # fmt: skip
        return out

    def attention(
        self, qkv: Tensor, kv: Tensor, rows: PagedRows, cos: Tensor, sin: Tensor, scale: float
    ) -> Tensor:
        tokens, total, dim = qkv.shape
        kv_heads, block_tokens = kv.shape[2], kv.shape[3]
        heads = total - 2 * kv_heads
        dtype = _DTYPES[qkv.dtype]
        to_block, to_value, to_head = kv.stride()[:3]
        shape = _SHAPE(heads, kv_heads, dim, to_block, to_value, to_head, block_tokens)
        self._library.skerry_rotate_and_write(
            dtype, shape, tokens, qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), kv.data_ptr(),
            rows.slots.data_ptr(), self._threads,
        )  # fmt: skip
        out = qkv.new_empty((tokens, heads, dim))
        if rows.decode:
            self._library.skerry_decode(
                dtype, shape, rows.decode, qkv.data_ptr(), kv.data_ptr(), rows.tables.data_ptr(),
                rows.tables.shape[1], rows.spans.data_ptr(), scale, out.data_ptr(), self._threads,
            )  # fmt: skip
        if rows.decode < len(rows.lengths):
            prompt_rows(qkv[:, :heads], kv, rows, scale, out)
        return out.view(tokens, heads * dim)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[1] // 2
        out = gate_up.new_empty((gate_up.shape[0], width))
        self._library.skerry_silu_mul(
            _DTYPES[out.dtype], out.shape[0], width, gate_up.data_ptr(), out.data_ptr(),
            self._threads,
        )  # fmt: skip
        return out

    def quantised(self, dense: Dense, encoding: str, blocks: Tensor) -> Linear:
        fits = dense.weight.dtype == torch.bfloat16 and dense.bias is None
        if fits and encoding in BLOCK_ENCODINGS:
            return BlockLinear(self._library, dense, encoding, blocks, self._threads)
        return dense


class BlockLinear:
    """A dense weight and the blocks it came from, which few rows are multiplied with.

    Exact in the weights (the dense one rounds them to bf16), sums in fp32.
    """

    __slots__ = ("_library", "_threads", "blocks", "dense", "kind")

    def __init__(
        self, library: ctypes.CDLL, dense: Dense, encoding: str, blocks: Tensor, threads: int
    ) -> None:
        out, columns = dense.shape
        rows = blocks.contiguous()
        if rows.shape[0] != out or columns % BLOCK_VALUES:
            raise ValueError(f"{list(blocks.shape)} bytes are no blocks of {out}×{columns}")
        self.dense = dense
        self.blocks = rows
        self.kind = BLOCK_ENCODINGS[encoding]
        self._library = library
        self._threads = threads

    @property
    def shape(self) -> tuple[int, int]:
        return self.dense.shape

    def __call__(self, x: Tensor) -> Tensor:
        tokens = x.shape[0]
        if tokens > BLOCK_ROWS:
            return self.dense(x)
        out, columns = self.dense.shape
        y = x.new_empty((tokens, out))
        self._library.skerry_block_linear(
            self.kind, tokens, out, columns, x.data_ptr(), self.blocks.data_ptr(), y.data_ptr(),
            self._threads,
        )  # fmt: skip
        return y
