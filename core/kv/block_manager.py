"""Who holds which KV block: free lists, reference counts, block tables. Numbers only, no memory.

Every KV group has a pool of its own; a sequence has one block table per group, all equally long.
Each block of a pool is in exactly one state::

    free ──grow──▶ held ──free──▶ free              never registered, or its entry is gone
                   held ──free──▶ idle (cached)     registered in the prefix cache
    idle ──adopt─▶ held      idle ──evicted─▶ free

Held blocks that are registered are shared and never written again: a match covers full blocks
before the last token only, so what is computed next always lies in a block of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from core.errors import InternalError
from core.kv.prefix_cache import CacheChanges, CachedBlock, PrefixCache, TokenChain
from core.types import BLOCK_TOKENS


def blocks_for(tokens: int) -> int:
    """Blocks that `tokens` positions take."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, per group in order of positions.

    `chain`: the cache entries of the table's first full blocks; an entry may lie in a block of
    another sequence that computed the same tokens first.
    """

    groups: tuple[list[int], ...]
    chain: list[CachedBlock] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.groups[0])

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return len(self.groups[0]) * BLOCK_TOKENS

    def view(self, tokens: int) -> tuple[tuple[int, ...], ...]:
        """Per group, the blocks of the first `tokens` positions."""
        count = blocks_for(tokens)
        return tuple(tuple(group[:count]) for group in self.groups)


class BlockManager:
    """`blocks` gives the pool size of each KV group."""

    def __init__(self, blocks: Sequence[int]) -> None:
        if not blocks or min(blocks) < 1:
            raise InternalError(f"a KV pool needs at least one block per group, not {blocks}")
        self.totals = tuple(blocks)
        self.cache = PrefixCache()
        self._free: list[list[int]] = [list(range(n - 1, -1, -1)) for n in blocks]
        self._refs: list[list[int]] = [[0] * n for n in blocks]

    @property
    def total(self) -> int:
        """Blocks that one sequence could hold if it were alone: the smallest pool."""
        return min(self.totals)

    @property
    def available(self) -> int:
        """Blocks that can be taken now, in each group, evicting what is idle."""
        return min(len(free) for free in self._free) + self.cache.idle

    @property
    def used(self) -> int:
        """Blocks of group 0 that sequences hold."""
        return self.totals[0] - len(self._free[0]) - self.cache.idle

    def new_table(self) -> BlockTable:
        return BlockTable(tuple([] for _ in self.totals))

    def fits(self, start: Sequence[CachedBlock], blocks: int, *, spare: int = 0) -> bool:
        """Would a table of `blocks` that begins with the cached `start` leave `spare` blocks?"""
        woken = sum(1 for entry in start if not self._held(entry))
        return self.available - woken - (blocks - len(start)) >= spare

    def adopt(self, table: BlockTable, start: Sequence[CachedBlock]) -> None:
        """Let an empty `table` begin with cached blocks."""
        for entry in start:
            if not self._held(entry):
                self.cache.wake(entry)
            for group, block in enumerate(entry.blocks):
                self._refs[group][block] += 1
                table.groups[group].append(block)
            table.chain.append(entry)

    def grow(self, table: BlockTable, count: int) -> None:
        """Append `count` blocks in each group; the caller has looked at `available`."""
        if count > self.available:
            raise InternalError(f"{count} blocks were asked for, {self.available} are available")
        for group, free in enumerate(self._free):
            while len(free) < count:
                self._reclaim(self.cache.evict())
            for _ in range(count):
                block = free.pop()
                self._refs[group][block] = 1
                table.groups[group].append(block)

    def register(self, table: BlockTable, chain: TokenChain, computed: int) -> None:
        """Offer the full blocks among the first `computed` positions to the prefix cache."""
        entries = table.chain
        while entries and not entries[-1].alive:  # a chain dies from some block to its end
            entries.pop()
        for index in range(len(entries), computed // BLOCK_TOKENS):
            parent = entries[-1] if entries else None
            blocks = tuple(group[index] for group in table.groups)
            entry = self.cache.add(chain, index, parent, blocks)
            if entry is None:
                return
            entries.append(entry)

    def free(self, table: BlockTable) -> None:
        """Let go of all blocks; `table` is empty afterwards.

        The end of a chain goes first, so that of idle blocks the shared beginnings stay longest.
        """
        for index in range(len(table) - 1, -1, -1):
            row = [group[index] for group in table.groups]
            for group, block in enumerate(row):
                self._refs[group][block] -= 1
            if self._refs[0][row[0]]:
                continue
            entry = self.cache.at(row[0])
            if entry is not None:
                self.cache.rest(entry)
            else:
                for group, block in enumerate(row):
                    self._free[group].append(block)
        for blocks in table.groups:
            blocks.clear()
        table.chain.clear()

    def distrust(self, table: BlockTable) -> None:
        """Take everything that `table` reads out of the prefix cache: its content is in doubt."""
        if table.chain:
            self._reclaim(self.cache.discard(table.chain[0]))
        table.chain.clear()

    def take_changes(self) -> CacheChanges:
        return self.cache.take_changes()

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Compare all books, given every table there is. Raises InternalError with the first
        disagreement."""
        held = [[0] * n for n in self.totals]
        for table in tables:
            for group, blocks in enumerate(table.groups):
                if len(blocks) != len(table):
                    raise InternalError(f"group {group} of a table has {len(blocks)} blocks")
                for block in blocks:
                    held[group][block] += 1
        idle = [[0] * n for n in self.totals]
        for entry in self.cache.entries():
            if not self._held(entry):
                for group, block in enumerate(entry.blocks):
                    idle[group][block] += 1
        for group, refs in enumerate(self._refs):
            free = [0] * len(refs)
            for block in self._free[group]:
                free[block] += 1
            for block, count in enumerate(refs):
                name = f"block {block} of group {group}"
                if count != held[group][block]:
                    raise InternalError(
                        f"{name} has {count} references and {held[group][block]} holders"
                    )
                if free[block] + idle[group][block] + (count > 0) != 1:
                    raise InternalError(
                        f"{name} is {free[block]}× free, {idle[group][block]}× idle "
                        f"and has {count} references"
                    )
        self.cache.check_integrity(self._held)

    def _held(self, entry: CachedBlock) -> bool:
        return self._refs[0][entry.blocks[0]] > 0

    def _reclaim(self, gone: Iterable[CachedBlock]) -> None:
        """Free the blocks of entries that are no longer registered, unless somebody holds them."""
        for entry in gone:
            if not self._held(entry):
                for group, block in enumerate(entry.blocks):
                    self._free[group].append(block)
