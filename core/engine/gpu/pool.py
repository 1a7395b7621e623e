"""KV on the device, and its double in the memory that the node front shares.

The front sends and receives blocks on the host, under the same numbers: a block that a peer may
want is copied out when it has been computed, one that came from a peer is copied in before a step
may read it. Blocks lie together on both sides, so each is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.engine.gpu.device import Device, Mark
from core.engine.plan import Row
from core.kv.geometry import KVGeometry
from core.kv.pool import KVPool
from core.types import BLOCK_TOKENS


class DevicePool:
    """[block, layer, k/v, kv_head, token, dim] of each group, on the device. Starts as zeros: what
    a block held before is masked, but a product with it must be finite."""

    def __init__(self, geometry: KVGeometry, where: torch.device) -> None:
        self.groups: tuple[Tensor, ...] = tuple(
            torch.zeros(
                (blocks, group.layers, group.parts, group.kv_heads, BLOCK_TOKENS, group.head_dim),
                dtype=getattr(torch, group.dtype),
                device=where,
            )
            for group, blocks in zip(geometry.groups, geometry.blocks, strict=True)
        )

    def layers(self, group: int) -> tuple[Tensor, ...]:
        """[block, k/v, kv_head, token, dim] of each layer of one group."""
        return self.groups[group].unbind(1)


class Mirror:
    """`host` lies in memory that the device has pinned."""

    def __init__(self, pool: DevicePool, host: KVPool, device: Device) -> None:
        self._pairs = tuple(zip(pool.groups, host.groups, strict=True))
        self._device = device

    def out(self, rows: Sequence[Row]) -> Mark | None:
        """Copy what `rows`, given to the device before, leave for others. None: nothing."""
        wanted = [groups for row in rows if any(groups := settled(row))]
        if not wanted:
            return None
        with self._device.leaving() as mark:
            for groups in wanted:
                for (own, shared), blocks in zip(self._pairs, groups, strict=True):
                    for block in blocks:
                        shared[block].copy_(own[block], non_blocking=True)
            return mark()

    def into(self, groups: Sequence[Sequence[int]]) -> None:
        """Copy blocks of each group to the device, ahead of what is given to it from now on."""
        if not any(groups):
            return
        with self._device.arriving():
            for (own, shared), blocks in zip(self._pairs, groups, strict=True):
                for block in blocks:
                    own[block].copy_(shared[block], non_blocking=True)


def settled(row: Row) -> list[tuple[int, ...]]:
    """Of each group, the blocks that a row fills to their end: prefixes are shared by whole blocks.
    Of a row that only makes KV its last block as well, for it may be handed over."""
    first, end = row.start // BLOCK_TOKENS, row.start + len(row.token_ids) - row.drafts
    last = -(-end // BLOCK_TOKENS) if row.sample is None else end // BLOCK_TOKENS
    return [table[first:last] for table in row.block_tables]
