"""The KV pool as tensors over memory that the node front shares."""

from __future__ import annotations

import mmap
from typing import Protocol

import torch
from torch import Tensor

from core.kv.geometry import DTYPE_BYTES, KVGeometry
from core.types import BLOCK_TOKENS


class BlockPool(Protocol):
    """KV of all groups as tensors, wherever they lie."""

    @property
    def groups(self) -> tuple[Tensor, ...]:
        """[block, layer, k/v, kv_head, token, dim] of each group."""
        ...

    def layers(self, group: int) -> tuple[Tensor, ...]:
        """[block, k/v, kv_head, token, dim] of each layer of one group."""
        ...


class KVPool:
    """Views of `memory`, which must hold `geometry.pool_bytes` and outlive this object."""

    def __init__(self, geometry: KVGeometry, memory: mmap.mmap) -> None:
        self.groups: tuple[Tensor, ...] = tuple(
            _view(memory, geometry, index) for index in range(len(geometry.groups))
        )
        """[block, layer, k/v, kv_head, token, dim] of each group."""

    def layers(self, group: int) -> tuple[Tensor, ...]:
        """[block, k/v, kv_head, token, dim] of each layer of one group."""
        return self.groups[group].unbind(1)


def _view(memory: mmap.mmap, geometry: KVGeometry, index: int) -> Tensor:
    group, blocks = geometry.groups[index], geometry.blocks[index]
    dtype: torch.dtype = getattr(torch, group.dtype)
    count = blocks * group.block_bytes // DTYPE_BYTES[group.dtype]
    flat = torch.empty(0, dtype=dtype)  # a stage may have no layer of this group
    if count:
        offset = geometry.pool_offset(index)
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    return flat.view(
        blocks, group.layers, group.parts, group.kv_heads, BLOCK_TOKENS, group.head_dim
    )
