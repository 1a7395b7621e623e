"""The KV pool as tensors over memory that the node front shares."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from core.kv.geometry import KVGeometry
from core.types import BLOCK_TOKENS


class KVPool:
    """Views of `memory`, which must hold `geometry.pool_bytes` and outlive this object."""

    def __init__(self, geometry: KVGeometry, memory: mmap.mmap) -> None:
        self.groups: tuple[Tensor, ...] = tuple(
            torch.frombuffer(
                memory,
                dtype=getattr(torch, group.dtype),
                count=blocks * group.layers * 2 * group.kv_heads * BLOCK_TOKENS * group.head_dim,
                offset=geometry.pool_offset(index),
            ).view(blocks, group.layers, 2, group.kv_heads, BLOCK_TOKENS, group.head_dim)
            for index, (group, blocks) in enumerate(
                zip(geometry.groups, geometry.blocks, strict=True)
            )
        )
        """[block, layer, k/v, kv_head, token, dim] of each group."""

    def layers(self, group: int) -> tuple[Tensor, ...]:
        """[block, k/v, kv_head, token, dim] of each layer of one group."""
        return self.groups[group].unbind(1)
