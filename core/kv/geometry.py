"""The shape of a node's KV cache, as plain numbers that every process may read.

Pool order, in memory and on the wire (DESIGN §5): [block, layer, k/v, kv_head, token, dim], one
pool per KV group, blocks contiguous. Each rank of a node has pools of its own layers and heads;
block numbers mean the same on all ranks of a pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from core.types import BLOCK_TOKENS

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose KV has one kind, dtype and shape, and one block table per sequence.

    `kind` is full, window, chunked, latent or draft; `window` is in tokens for the kinds that
    forget. `layers` and `kv_heads` are those that a rank holds, from `first_layer` and
    `first_head` on, both counted within the group of the whole model.
    """

    name: str
    kind: str = "full"
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None
    first_layer: int = 0
    first_head: int = 0

    @property
    def parts(self) -> int:
        """K and V, or the one compressed row that stands for both."""
        return 1 if self.kind == "latent" else 2

    @property
    def slab_bytes(self) -> int:
        """Bytes of one block's tokens in one layer, plane and head: the unit of every split."""
        return BLOCK_TOKENS * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, K and V, all heads of this rank."""
        return self.layers * self.parts * self.kv_heads * self.slab_bytes


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
