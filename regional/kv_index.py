"""Which pool holds which block, exactly: fed by the nodes' own cache events.

Nothing is guessed. A pool counts as holding nothing until its first snapshot, after a gap in the
numbers of its events, and when it claims more blocks than it has; the next snapshot makes it known
again. What is known of a pool dies with its node's session.

One map leads from a block to the pools that hold it, as the bits of a number: a chain is walked
once, whatever the number of pools. A pool's bit says "in memory", the bit above it "in a tier
below", from which the node brings it back by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from core.prefix import HASH_BYTES
from core.types import PoolId

MEMORY, BELOW = 0, 1
"""The tiers that are told apart."""


@dataclass(frozen=True, slots=True)
class Held:
    """The longest run from the start of a chain that one pool holds: `blocks`, of which `below` lie
    in a tier below its memory."""

    blocks: int = 0
    below: int = 0


@dataclass(slots=True)
class _Tier:
    """What one pool has told of one tier."""

    limit: int
    bit: int
    known: bool = False
    sequence: int = 0
    blocks: set[bytes] = field(default_factory=set)


class KvIndex:
    """Block hashes by pool. Memory: an entry in two tables for each block that a pool holds."""

    def __init__(self) -> None:
        self._tiers: dict[tuple[PoolId, int], _Tier] = {}
        self._holders: dict[bytes, int] = {}
        self._slots: dict[int, PoolId] = {}
        """Which pool has the two bits from this one on; the lower one is for memory."""
        self._low = 0
        """The lower bits of all pools."""

    def join(self, pool: PoolId, *, limit: int, below: int = 0) -> None:
        """A new session of a node, whose pool has `limit` blocks in memory and up to `below` in
        tiers below it; nothing is known of either yet."""
        self.leave(pool)
        slot = next(one for one in itertools.count(step=2) if one not in self._slots)
        self._slots[slot] = pool
        self._low |= 1 << slot
        for tier, most in ((MEMORY, limit), (BELOW, below)):
            self._tiers[pool, tier] = _Tier(most, 1 << slot + tier)

    def leave(self, pool: PoolId) -> None:
        for tier in (MEMORY, BELOW):
            gone = self._tiers.pop((pool, tier), None)
            if gone is None:
                continue
            self._forget(gone)
            slot = gone.bit.bit_length() - 1
            self._slots.pop(slot, None)
            self._low &= ~gone.bit

    def apply(
        self,
        pool: PoolId,
        *,
        sequence: int,
        snapshot: bool,
        stored: bytes,
        evicted: bytes,
        tier: int = MEMORY,
    ) -> bool:
        """Take one CacheEvents in, evictions first. False: the tier is unknown from here on."""
        held = self._tiers.get((pool, tier))
        if held is None:
            return False
        whole = len(stored) % HASH_BYTES == 0 and len(evicted) % HASH_BYTES == 0
        follows = held.known and sequence == held.sequence + 1
        if not whole or not (snapshot or follows):
            self._forget(held)
            return False
        if snapshot:
            self._forget(held)
        held.known, held.sequence = True, sequence
        self._drop(held, _split(evicted))
        holders, blocks, bit = self._holders, held.blocks, held.bit
        for block in _split(stored):
            blocks.add(block)
            holders[block] = holders.get(block, 0) | bit
        if len(blocks) > held.limit:
            self._forget(held)
        return held.known

    def known(self, pool: PoolId, tier: int = MEMORY) -> bool:
        held = self._tiers.get((pool, tier))
        return held is not None and held.known

    def size(self, pool: PoolId, tier: int = MEMORY) -> int:
        held = self._tiers.get((pool, tier))
        return len(held.blocks) if held else 0

    @property
    def blocks(self) -> int:
        """Different blocks that are held anywhere."""
        return len(self._holders)

    def holds(self, block: bytes) -> bool:
        """Whether any pool holds `block`."""
        return block in self._holders

    def overlaps(self, hashes: Sequence[bytes]) -> Mapping[PoolId, Held]:
        """What each pool holds of a chain; those that hold nothing of it are left out."""
        runs: dict[PoolId, Held] = {}
        below: dict[int, int] = {}
        alive = self._low
        for number, block in enumerate(hashes):
            mask = self._holders.get(block, 0)
            if not alive & ~mask:
                continue  # all that are left hold it in memory
            lost = alive & ~(mask | mask >> 1)
            if lost:
                alive &= ~lost
                if number:
                    self._note(runs, lost, number, below)
                if not alive:
                    return runs
            for slot in _bits(alive & ~mask):
                below[slot] = below.get(slot, 0) + 1
        if hashes:
            self._note(runs, alive, len(hashes), below)
        return runs

    def overlap(self, pool: PoolId, hashes: Sequence[bytes]) -> int:
        """Blocks of the longest run from the start of `hashes` that `pool` holds."""
        return self.overlaps(hashes).get(pool, Held()).blocks

    def _note(
        self, runs: dict[PoolId, Held], ended: int, blocks: int, below: Mapping[int, int]
    ) -> None:
        for slot in _bits(ended):
            runs[self._slots[slot]] = Held(blocks, below.get(slot, 0))

    def _forget(self, held: _Tier) -> None:
        held.known = False
        self._drop(held, tuple(held.blocks))

    def _drop(self, held: _Tier, gone: Iterator[bytes] | tuple[bytes, ...]) -> None:
        holders, blocks, others = self._holders, held.blocks, ~held.bit
        for block in gone:
            if block not in blocks:
                continue
            blocks.discard(block)
            left = holders[block] & others
            if left:
                holders[block] = left
            else:
                del holders[block]


def _bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _split(joined: bytes) -> Iterator[bytes]:
    return (joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))
