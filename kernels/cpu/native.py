"""The operations of `kernels.ops.Ops` in native code on the CPU (layers.cpp).

Weights stay as they are stored, where they are stored: a product unpacks sixteen rows at a time.
Activations are float. Of blocks of 4 or 8 bits a product takes integers of 8 bits for each block of
32 activations when the dtype is bfloat16, 16 bits where a block holds an outlier (products.h), and
floats when it is float32. Every number depends
on its own token and sequence alone: not on the batch, the number of threads, or the chunk.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu.crew import Crew
from kernels.cpu.steps import NativeSteps, StoredExperts
from kernels.cpu.structs import (
    SIGNATURES,
    CAttention,
    CLayer,
    CModel,
    CProduct,
    CRows,
    address,
)
from kernels.experts import Experts
from kernels.layers import GatedMlp, HeadAttention, Layer, Layers, Shape
from kernels.linear import BLOCK_VALUES, Linear, Stored, decoded
from kernels.paged_attention import PagedRows

ENCODINGS = {"Q8_0": 0, "Q4_0": 1, "Q4_1": 2, "F32": 3, "F16": 4, "BF16": 5}
"""What products read; the numbers are theirs."""
_INTEGERS = ("Q8_0", "Q4_0", "Q4_1")
_PLAIN = {torch.float32: "F32", torch.bfloat16: "BF16"}
PANEL = 16
"""Rows of a weight that are unpacked together."""


class Scratch:
    """Memory for one call at a time; grows to the largest one."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> int:
        """The address of `nbytes` that hold until the next call."""
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory.data_ptr()


class NativeOps:
    """All tensors are contiguous and on the CPU. For one thread at a time."""

    def __init__(self, library: Path, dtype: torch.dtype, *, threads: int) -> None:
        """Raises OSError when the library cannot be loaded."""
        self.dtype = dtype
        self.threads = threads
        self.library = ctypes.CDLL(str(library))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self.library, name)
            function.restype = result
            function.argtypes = arguments
        self.scratch = Scratch()
        self.crew = Crew(threads)

    @staticmethod
    def fits(columns: Sequence[int]) -> bool:
        return not any(count % BLOCK_VALUES for count in columns)

    def placed(self, numbers: Tensor) -> Tensor:
        return numbers

    def vector(self, stored: Stored) -> Tensor:
        return decoded([stored], torch.float32)[0]

    def linear(self, parts: Sequence[Stored], bias: Tensor | None) -> StoredLinear:
        return StoredLinear(self, [readable(part, self.dtype) for part in parts], bias)

    def embedding(self, stored: Stored) -> StoredEmbedding:
        return StoredEmbedding(self, readable(stored, self.dtype))

    def matrix(self, parts: Sequence[Stored], *, exact: bool = False) -> Tensor:
        return decoded(parts, torch.float32)

    def experts(
        self, gate_up: Sequence[Sequence[Stored]], down: Sequence[Sequence[Stored]]
    ) -> Experts:
        pairs = zip(gate_up, down, strict=True)
        return StoredExperts(
            self, [(self.linear(one, None), self.linear(other, None)) for one, other in pairs]
        )

    def layers(self, layers: Sequence[Layer], shape: Shape) -> Layers:
        """One call for all layers where they are of the plain kind, else step by step."""
        plain = [one for one in map(PlainLayer.of, layers) if one is not None]
        if shape.reduce is None and len(plain) == len(layers):
            return NativeLayers(self, plain, shape)
        return NativeSteps(self, layers, shape)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self.library.skerry_rms_norm(
            x.shape[0], x.shape[1], x.data_ptr(), weight.data_ptr(), eps, out.data_ptr()
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See kernels.gated."""
        width = gate_up.shape[1] // 2
        out = gate_up.new_empty((gate_up.shape[0], width))
        self.library.skerry_silu_mul(out.shape[0], width, gate_up.data_ptr(), out.data_ptr())
        return out

    def attention(
        self,
        qkv: Tensor,
        kv: Tensor,
        rows: PagedRows,
        positions: Tensor,
        inverse_frequencies: Tensor,
        window: int | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """See kernels.stepwise.attend; `qkv` fp32 is overwritten. `scale` None: 1 / √dim."""
        tokens, total, dim = qkv.shape
        heads = total - 2 * kv.shape[2]
        shape = attention_of(kv, heads, window, scale)
        paged = rows_of(rows, positions)
        out = qkv.new_empty((tokens, heads * dim))
        nbytes = self.library.skerry_attention_bytes(ctypes.byref(shape), tokens, self.threads)
        lost = self.library.skerry_attention(
            ctypes.byref(shape), ctypes.byref(paged), inverse_frequencies.data_ptr(),
            qkv.data_ptr(), kv.data_ptr(), out.data_ptr(), self.scratch.take(nbytes),
            self.crew.begin(),
        )  # fmt: skip
        self.crew.end(lost)
        return out


class StoredLinear:
    """A `Linear` over stored bytes."""

    __slots__ = ("_keep", "_ops", "product", "shape")

    def __init__(self, ops: NativeOps, parts: Sequence[Stored], bias: Tensor | None) -> None:
        panels: list[int] = []
        first = 0
        for part in parts:
            panels += _panels(part, first)
            first += part.data.shape[0]
        table = torch.tensor(panels, dtype=torch.int64)
        self._ops = ops
        self._keep = (table, [part.data for part in parts], bias)
        self.shape = (first, parts[0].columns)
        encodings = {part.encoding for part in parts}
        exact = ops.dtype == torch.float32 or encodings.isdisjoint(_INTEGERS)
        self.product = CProduct(
            panels=table.data_ptr(),
            panel_count=len(panels) // 5,
            outs=first,
            ins=parts[0].columns,
            bias=address(bias),
            exact=exact,
            alike=not exact and len(encodings) == 1,
        )

    def __call__(self, x: Tensor) -> Tensor:
        ops, tokens = self._ops, x.shape[0]
        out = x.new_empty((tokens, self.shape[0]))
        product = ctypes.byref(self.product)
        nbytes = ops.library.skerry_linear_bytes(product, tokens, ops.threads)
        memory = ops.scratch.take(nbytes)
        lost = ops.library.skerry_linear(
            product, tokens, x.data_ptr(), out.data_ptr(), memory, ops.crew.begin()
        )
        ops.crew.end(lost)
        return out


class StoredEmbedding:
    """An `Embedding` over stored bytes, whose rows are in order."""

    __slots__ = ("_ops", "_stored")

    def __init__(self, ops: NativeOps, stored: Stored) -> None:
        self._ops = ops
        self._stored = stored

    def __call__(self, ids: Tensor) -> Tensor:
        stored = self._stored
        out = torch.empty((ids.shape[0], stored.columns))
        self._ops.library.skerry_rows(
            ENCODINGS[stored.encoding], stored.data.data_ptr(), stored.data.stride(0),
            stored.columns, ids.shape[0], ids.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out


class NativeLayers:
    """`kernels.layers.Layers` in one call."""

    def __init__(self, ops: NativeOps, layers: Sequence[PlainLayer], shape: Shape) -> None:
        self._ops = ops
        self._keep = tuple(layers)
        self._shape = shape
        self._bound: Sequence[Tensor] | None = None
        self._layers = (CLayer * len(layers))(*(_layer(layer) for layer in layers))
        self._model = CModel(
            layers=ctypes.addressof(self._layers),
            layer_count=len(layers),
            hidden=shape.hidden,
            width=max((layer.mlp.gate_up.shape[0] // 2 for layer in layers), default=0),
            frequencies=shape.inverse_frequencies.data_ptr(),
            eps=shape.norm_eps,
        )

    def __call__(
        self, residual: Tensor, positions: Tensor, groups: Sequence[PagedRows], kv: Sequence[Tensor]
    ) -> Tensor:
        if kv is not self._bound:
            self._bind(kv)
        ops, tokens = self._ops, residual.shape[0]
        rows = (CRows * len(groups))(*(rows_of(group, positions) for group in groups))
        model = ctypes.byref(self._model)
        nbytes = ops.library.skerry_layers_bytes(model, tokens, ops.threads)
        memory = ops.scratch.take(nbytes)
        lost = ops.library.skerry_layers(model, rows, residual.data_ptr(), memory, ops.crew.begin())
        ops.crew.end(lost)
        return residual

    def _bind(self, kv: Sequence[Tensor]) -> None:
        for place, tensor in zip(self._layers, kv, strict=True):
            place.kv = attention_of(tensor, self._shape.heads, None, self._shape.scale)
            place.kv_data = tensor.data_ptr()
        for place, layer in zip(self._layers, self._keep, strict=True):
            place.kv.window = layer.attention.window or 0
        self._bound = kv


def readable(part: Stored, dtype: torch.dtype) -> Stored:
    """`part` itself, or its numbers where products cannot read its encoding."""
    if part.encoding in ENCODINGS:
        return part
    weight = decoded([part], dtype)
    return _Decoded(_PLAIN[dtype], weight.view(torch.uint8), weight.shape[1])


@dataclass(frozen=True, slots=True)
class _Decoded:
    encoding: str
    data: Tensor
    columns: int
    pairs: int = 0

    def decode(self, out: Tensor) -> None:
        out.copy_(self.data.view(torch.float32 if self.encoding == "F32" else torch.bfloat16))


def _panels(part: Stored, first: int) -> list[int]:
    """(address, distance of rows, kind, first column, rows) of each panel, flat."""
    rows, step, kind = part.data.shape[0], part.data.stride(0), ENCODINGS[part.encoding]
    base = part.data.data_ptr()
    found: list[int] = []
    halves = 2 * part.pairs or 1
    count = rows // halves
    for half in range(halves):  # rows that lie at equal distances
        if part.pairs:
            start, distance = base + (half // 2 * 2 * count + half % 2) * step, 2 * step
        else:
            start, distance = base, step
        for at in range(0, count, PANEL):
            own = min(PANEL, count - at)
            found += (start + at * distance, distance, kind, first + half * count + at, own)
    return found


def attention_of(
    kv: Tensor, heads: int, window: int | None, scale: float | None = None
) -> CAttention:
    to_block, to_value, to_head = kv.stride()[:3]
    return CAttention(
        heads=heads,
        kv_heads=kv.shape[2],
        dim=kv.shape[4],
        to_block=to_block,
        to_value=to_value,
        to_head=to_head,
        block_tokens=kv.shape[3],
        kv_bf16=kv.dtype == torch.bfloat16,
        window=window or 0,
        scale=kv.shape[4] ** -0.5 if scale is None else scale,
    )


def rows_of(rows: PagedRows, positions: Tensor) -> CRows:
    return CRows(
        count=len(rows.lengths),
        tokens=positions.shape[0],
        spans=rows.spans.data_ptr(),
        tables=rows.tables.data_ptr(),
        table_width=rows.tables.shape[1],
        slots=rows.slots.data_ptr(),
        positions=positions.data_ptr(),
    )


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """What layers.cpp computes: grouped heads without norms of their own and a gated MLP."""

    attention_norm: Tensor
    attention: HeadAttention
    mlp_norm: Tensor
    mlp: GatedMlp
    group: int

    @classmethod
    def of(cls, layer: Layer) -> PlainLayer | None:
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(attention, HeadAttention) or not isinstance(mlp, GatedMlp):
            return None
        products = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
        if attention.query_norm is not None:
            return None
        if not all(isinstance(product, StoredLinear) for product in products):
            return None
        return cls(layer.attention_norm, attention, layer.mlp_norm, mlp, layer.group)


def _layer(layer: PlainLayer) -> CLayer:
    def product(linear: Linear) -> CProduct:
        assert isinstance(linear, StoredLinear), "a plain layer is made of this object's products"
        return linear.product

    return CLayer(
        attention_norm=layer.attention_norm.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        qkv=product(layer.attention.qkv),
        output=product(layer.attention.output),
        gate_up=product(layer.mlp.gate_up),
        down=product(layer.mlp.down),
        group=layer.group,
    )
