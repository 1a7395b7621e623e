"""From the KV of one plan's ranks to that of another's: which bytes of whose blocks make one of
theirs. Pure; the bytes are moved by a transport.

A block is a row of slabs [layer, plane, head]. A rank holds a rectangle of layers and heads; any
other rectangle is put together from runs of slabs that lie side by side both here and there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from core.errors import TransferFailed
from core.kv.geometry import KVGroup


class Run(NamedTuple):
    """`size` bytes from `offset` on, in a block of `rank`."""

    rank: int
    offset: int
    size: int


class Rectangle(NamedTuple):
    """Layers and heads of a KV group."""

    first_layer: int
    layers: int
    first_head: int
    heads: int


def rectangle(group: KVGroup) -> Rectangle:
    return Rectangle(group.first_layer, group.layers, group.first_head, group.kv_heads)


def gather(wanted: Rectangle, held: Mapping[int, KVGroup]) -> tuple[Run, ...]:
    """The runs that make one block of `wanted`, in its order. `held` is what each of our ranks
    holds of the group. Heads that several ranks have copies of come from the first of them.

    Raises TransferFailed when a slab is held by nobody.
    """
    runs: list[Run] = []
    for run in _runs(wanted, held):
        last = runs[-1] if runs else None
        if last and last.rank == run.rank and last.offset + last.size == run.offset:
            runs[-1] = Run(last.rank, last.offset, last.size + run.size)
        else:
            runs.append(run)
    return tuple(runs)


def _runs(wanted: Rectangle, held: Mapping[int, KVGroup]) -> Iterator[Run]:
    """One for each layer, plane and span of heads that a rank holds."""
    end = wanted.first_head + wanted.heads
    for layer in range(wanted.first_layer, wanted.first_layer + wanted.layers):
        here = {rank: group for rank, group in held.items() if _in_layers(layer, group)}
        for plane in range(next(iter(here.values())).parts if here else 1):
            head = wanted.first_head
            while head < end:
                rank, group = _holder(layer, head, here)
                count = min(end, group.first_head + group.kv_heads) - head
                row = (layer - group.first_layer) * group.parts + plane
                slab = row * group.kv_heads + head - group.first_head
                yield Run(rank, slab * group.slab_bytes, count * group.slab_bytes)
                head += count


def _in_layers(layer: int, group: KVGroup) -> bool:
    return group.first_layer <= layer < group.first_layer + group.layers


def _holder(layer: int, head: int, held: Mapping[int, KVGroup]) -> tuple[int, KVGroup]:
    for rank, group in sorted(held.items()):
        if group.first_head <= head < group.first_head + group.kv_heads:
            return rank, group
    raise TransferFailed(f"no rank here holds KV head {head} of layer {layer}")
