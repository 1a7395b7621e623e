"""Decoder layers that know only what lies in a step's tensors, as kernels on a device do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kernels.layers import HeadAttention, Layer, Layers, Shape
from kernels.ops import TorchOps
from kernels.paged_attention import PagedRows
from kernels.stepwise import Places, TorchLayers


class AheadOps(TorchOps):
    def layers(self, layers: Sequence[Layer], shape: Shape) -> Layers:
        return AheadLayers(layers, shape)


class AheadLayers(TorchLayers):
    """The references, on the rows that `spans` names: one whose start is −1 is padding and gives
    zeros. The host's tuples bound them, but may be of another step."""

    def _attend(
        self, qkv: Tensor, kv: Tensor, rows: PagedRows, places: Places, attention: HeadAttention
    ) -> Tensor:
        there, real = named(rows)
        own = Places(places.positions[there], places.cos[there], places.sin[there])
        mixed = super()._attend(qkv[there], kv, real, own, attention)
        return spread(mixed, there)

    def _keep_latents(self, latents: Tensor, pool: Tensor, rows: PagedRows) -> None:
        there, real = named(rows)
        super()._keep_latents(latents[there], pool, real)

    def _attend_latents(
        self, queries: Tensor, pool: Tensor, rows: PagedRows, scale: float, rank: int
    ) -> Tensor:
        there, real = named(rows)
        return spread(super()._attend_latents(queries[there], pool, real, scale, rank), there)


def named(rows: PagedRows) -> tuple[Tensor, PagedRows]:
    """Which tokens are there, and their rows."""
    kept = rows.spans[:, 2] >= 0
    there = kept.repeat_interleave(rows.spans[:, 1].long())
    spans = rows.spans[kept]
    starts = tuple(spans[:, 2].tolist())
    assert max(starts, default=0) <= max(rows.starts)
    real = replace(
        rows,
        starts=starts,
        lengths=tuple(spans[:, 1].tolist()),
        decode=int((spans[:, 1] == 1).sum()),
        tables=rows.tables[kept],
        slots=rows.slots[there],
        spans=spans,
    )
    assert bool((real.slots >= 0).all())
    assert bool((rows.slots[~there] < 0).all())
    return there, real


def spread(mixed: Tensor, there: Tensor) -> Tensor:
    out = mixed.new_zeros(len(there), *mixed.shape[1:])
    out[there] = mixed
    return out
