"""Which pool holds which block, exactly: fed by the nodes' own cache events.

Nothing is guessed. A pool counts as holding nothing until its first snapshot, after a gap in the
numbers of its events, and when it claims more blocks than it has; the next snapshot makes it known
again. What is known of a pool dies with its node's session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from core.prefix import HASH_BYTES
from core.types import PoolId


@dataclass(slots=True)
class _Held:
    limit: int
    known: bool = False
    sequence: int = 0
    blocks: set[bytes] = field(default_factory=set)

    def forget(self) -> None:
        self.known = False
        self.blocks.clear()


class KvIndex:
    """Block hashes by pool. Memory: one set entry for each block of the region's pools at most."""

    def __init__(self) -> None:
        self._pools: dict[PoolId, _Held] = {}

    def join(self, pool: PoolId, *, limit: int) -> None:
        """A new session of a node, whose pool has `limit` blocks; nothing is known of it yet."""
        self._pools[pool] = _Held(limit)

    def leave(self, pool: PoolId) -> None:
        self._pools.pop(pool, None)

    def apply(
        self, pool: PoolId, *, sequence: int, snapshot: bool, stored: bytes, evicted: bytes
    ) -> bool:
        """Take one CacheEvents in, evictions first. False: the pool is unknown from here on."""
        held = self._pools.get(pool)
        if held is None:
            return False
        whole = len(stored) % HASH_BYTES == 0 and len(evicted) % HASH_BYTES == 0
        follows = held.known and sequence == held.sequence + 1
        if not whole or not (snapshot or follows):
            held.forget()
            return False
        if snapshot:
            held.blocks.clear()
        held.known, held.sequence = True, sequence
        held.blocks.difference_update(_split(evicted))
        held.blocks.update(_split(stored))
        if len(held.blocks) > held.limit:
            held.forget()
        return held.known

    def known(self, pool: PoolId) -> bool:
        held = self._pools.get(pool)
        return held is not None and held.known

    def size(self, pool: PoolId) -> int:
        held = self._pools.get(pool)
        return len(held.blocks) if held else 0

    def holds(self, block: bytes) -> bool:
        """Whether any pool holds `block`."""
        return any(block in held.blocks for held in self._pools.values())

    def overlap(self, pool: PoolId, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest run from the start of `hashes` that `pool` holds."""
        held = self._pools.get(pool)
        if held is None:
            return 0
        run = 0
        for one in hashes:
            if one not in held.blocks:
                break
            run += 1
        return run


def _split(joined: bytes) -> Iterator[bytes]:
    return (joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))
