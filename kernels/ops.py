"""The one place that decides which implementation of each operation runs on a device."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.cpu.build import library_path
from kernels.cpu.native import NativeOps
from kernels.gated import silu_mul
from kernels.kv_write import write_kv
from kernels.linear import Dense, Int4, Linear
from kernels.paged_attention import PagedRows, paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary


class Ops(Protocol):
    """What a decoder layer does besides its matrix products."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See kernels.rms_norm."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See kernels.rms_norm; `residual` is changed in place."""
        ...

    def attention(
        self, qkv: Tensor, kv: Tensor, rows: PagedRows, cos: Tensor, sin: Tensor, scale: float
    ) -> Tensor:
        """qkv [tokens, heads + 2·kv_heads, dim]: rotate q and k, store k and v, attend.

        Returns [tokens, heads · dim]; `qkv` may be overwritten.
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See kernels.gated."""
        ...

    def quantised(self, dense: Dense, encoding: str, blocks: Tensor) -> Linear:
        """A product that reads `blocks` [out, bytes of a row] (GGUF's form, all rows alike) where
        that is faster than `dense`; `dense` itself where it never is."""
        ...


class TorchOps:
    """The references: any device, any dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

    def attention(
        self, qkv: Tensor, kv: Tensor, rows: PagedRows, cos: Tensor, sin: Tensor, scale: float
    ) -> Tensor:
        tokens, total, dim = qkv.shape
        kv_heads = kv.shape[2]
        heads = total - 2 * kv_heads
        rotated = rotary(qkv[:, : heads + kv_heads], cos, sin)
        write_kv(rotated[:, heads:], qkv[:, heads + kv_heads :], kv, rows.slots)
        return paged_attention(rotated[:, :heads], kv, rows, scale).view(tokens, heads * dim)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def quantised(self, dense: Dense, encoding: str, blocks: Tensor) -> Linear:
        if Int4.fits(dense, encoding):
            return Int4(dense, encoding, blocks)
        return dense


def select(device: str, *, native: bool = True, threads: int = 1) -> Ops:
    """The fastest operations for `device` that this installation has. `native` False: only
    PyTorch. A compiled library that cannot be loaded raises OSError."""
    library = library_path()
    if device == "cpu" and native and library.exists():
        return NativeOps(library, threads=threads)
    return TorchOps()
