"""The shape of a node's KV cache, as plain numbers that every process may read.

Pool order, in memory and on the wire (DESIGN §5): [block, layer, k/v, kv_head, token, dim], one
pool per KV group, blocks contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from core.types import BLOCK_TOKENS

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose KV has one kind, dtype and shape, and one block table per sequence.

    `kind` is full, window, chunked, latent or draft; `window` is in tokens for the kinds that
    forget.
    """

    name: str
    kind: str = "full"
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, K and V."""
        elements = self.layers * 2 * self.kv_heads * BLOCK_TOKENS * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]


class KVGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """All groups of a model, and how many blocks each group's pool has."""

    groups: tuple[KVGroup, ...]
    blocks: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(group.block_bytes for group in self.groups) // BLOCK_TOKENS

    @property
    def pool_bytes(self) -> int:
        return sum(g.block_bytes * n for g, n in zip(self.groups, self.blocks, strict=True))

    def pool_offset(self, group: int) -> int:
        """Where the pool of `group` begins in the node's KV memory, in bytes."""
        sizes: Sequence[int] = [
            g.block_bytes * n for g, n in zip(self.groups, self.blocks, strict=True)
        ]
        return sum(sizes[:group])

    def block_span(self, group: int, block: int) -> tuple[int, int]:
        """[start, end) of one block in the node's KV memory, in bytes."""
        size = self.groups[group].block_bytes
        start = self.pool_offset(group) + block * size
        return start, start + size
