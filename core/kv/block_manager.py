"""Who holds which KV block: free lists, reference counts, block tables. Numbers only, no memory.

Every KV group has a pool of its own and every sequence a block table per group. Groups are *full*
(every later token sees every earlier one; group 0 always is) or forget what lies outside a window.
Tables of full groups are equally long; a window group's grows chunk by chunk and is released from
the front, so it never holds much more than the window. Each block is in exactly one state::

    free ──grow──▶ held ──free──▶ free              never registered, or its entry is gone
                   held ──free──▶ idle (cached)     registered in the prefix cache
    idle ──adopt─▶ held      idle ──evicted─▶ free

Held blocks that are registered are shared and never written again: a match covers full blocks
before the last token only, so what is computed next always lies in a block of its own. Blocks of
full groups are idle and evicted with their entry; an idle block of a window group can be taken
alone, and the entry goes on without it (`usable` then ends a match where it is missed).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from core.errors import InternalError
from core.kv.free_blocks import FreeBlocks
from core.kv.prefix_cache import GONE, CacheChanges, CachedBlock, PrefixCache, TokenChain
from core.types import BLOCK_TOKENS


def blocks_for(tokens: int) -> int:
    """Blocks that `tokens` positions take."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, per group in order of positions; GONE where a window has passed.

    `chain`: the cache entries of the table's first full blocks; an entry may lie in a block of
    another sequence that computed the same tokens first. `passed`: per group, how many blocks at
    the front are GONE. `root`: of the chain that they are of.
    """

    groups: tuple[list[int], ...]
    passed: list[int]
    root: bytes = b""
    chain: list[CachedBlock] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.groups[0])

    @property
    def capacity(self) -> int:
        """Positions that fit, in the full groups."""
        return len(self.groups[0]) * BLOCK_TOKENS

    def view(self, tokens: int) -> tuple[tuple[int, ...], ...]:
        """Per group, the blocks of the first `tokens` positions; 0 where a window has passed."""
        count = blocks_for(tokens)
        return tuple(
            (0,) * min(passed, count) + tuple(group[passed:count])
            for group, passed in zip(self.groups, self.passed, strict=True)
        )


class BlockManager:
    """`blocks` gives the pool size of each KV group, `windows` its window in tokens or None."""

    def __init__(self, blocks: Sequence[int], windows: Sequence[int | None] | None = None) -> None:
        if not blocks or min(blocks) < 1:
            raise InternalError(f"a KV pool needs at least one block per group, not {blocks}")
        self.totals = tuple(blocks)
        self.windows = tuple(windows or (None,) * len(blocks))
        if len(self.windows) != len(blocks) or self.windows[0] is not None:
            raise InternalError("KV group 0 must be full and each group have a window or None")
        self._full = [group for group, window in enumerate(self.windows) if window is None]
        self._windowed = [(g, w) for g, w in enumerate(self.windows) if w is not None]
        for group, window in self._windowed:
            if self.totals[group] < self._span(window):
                raise InternalError(
                    f"group {group} has {self.totals[group]} blocks; its window of {window} tokens "
                    f"needs {self._span(window)}"
                )
        self.cache = PrefixCache()
        self.free_blocks = tuple(FreeBlocks(n) for n in blocks)
        self._refs: list[list[int]] = [[0] * n for n in blocks]
        self._loose: dict[int, OrderedDict[int, CachedBlock]] = {
            group: OrderedDict() for group, _ in self._windowed
        }
        """Idle blocks of window groups, oldest first."""

    @property
    def total(self) -> int:
        """Blocks that one sequence could hold if it were alone: the smallest pool of those that
        keep everything."""
        return min(self.totals[group] for group in self._full)

    @property
    def forgets(self) -> bool:
        """Is there a group that does not keep all?"""
        return bool(self._windowed)

    @property
    def available(self) -> int:
        """Blocks that can be taken now in each full group, evicting what is idle."""
        return min(len(self.free_blocks[group]) for group in self._full) + self.cache.idle

    @property
    def used(self) -> int:
        """Blocks of group 0 that sequences hold."""
        return self.totals[0] - len(self.free_blocks[0]) - self.cache.idle

    def new_table(self, root: bytes = b"") -> BlockTable:
        return BlockTable(tuple([] for _ in self.totals), [0] * len(self.totals), root)

    # -------------------------------------------------------------- beginning

    def usable(self, start: list[CachedBlock]) -> list[CachedBlock]:
        """As much of a cached start as has, in every group, what the token after it sees."""
        count = len(start)
        for group, window in self._windowed:
            while count:
                first = _first_seen(count * BLOCK_TOKENS, window)
                missed = [n for n in range(first, count) if start[n].blocks[group] == GONE]
                if not missed:
                    break
                count = missed[-1]
        return start[:count] if count == len(start) else self.usable(start[:count])

    def fits(self, start: Sequence[CachedBlock], blocks: int, *, spare: int = 0) -> bool:
        """Would a table of `blocks` that begins with the cached `start` leave `spare` blocks?"""
        woken = sum(1 for entry in start if not self._held(entry))
        if self.available - woken - (blocks - len(start)) < spare:
            return False
        for group, window in self._windowed:
            first = _first_seen(len(start) * BLOCK_TOKENS, window)
            kept = start[first:]
            loose = self._loose[group]
            woken = sum(1 for entry in kept if entry.blocks[group] in loose)
            wanted = min(blocks - first, self._span(window)) - len(kept)
            if len(self.free_blocks[group]) + len(loose) - woken < wanted + spare:
                return False
        return True

    def adopt(self, table: BlockTable, start: Sequence[CachedBlock]) -> None:
        """Let an empty `table` begin with cached blocks, of which `usable` has been asked."""
        for entry in start:
            if not self._held(entry):
                self.cache.wake(entry)
            for group in self._full:
                self._refs[group][entry.blocks[group]] += 1
                table.groups[group].append(entry.blocks[group])
            table.chain.append(entry)
        for group, window in self._windowed:
            first = _first_seen(len(start) * BLOCK_TOKENS, window)
            self._pass(table, group, first)
            for entry in start[first:]:
                block = entry.blocks[group]
                self._loose[group].pop(block, None)
                self._refs[group][block] += 1
                table.groups[group].append(block)

    # -------------------------------------------------------------- growing

    def grow(self, table: BlockTable, count: int) -> None:
        """Append `count` blocks in each full group; the caller has looked at `available`."""
        if count > self.available:
            raise InternalError(f"{count} blocks were asked for, {self.available} are available")
        for group in self._full:
            while len(self.free_blocks[group]) < count:
                self._reclaim(self.cache.evict())
            self._append(table, group, count)

    def lacking(self, table: BlockTable, tokens: int) -> bool:
        """Is there a window group in which the blocks for `tokens` positions cannot be had?"""
        return any(
            blocks_for(tokens) - len(table.groups[group])
            > len(self.free_blocks[group]) + len(self._loose[group])
            for group, _ in self._windowed
        )

    def reach(self, table: BlockTable, tokens: int) -> int:
        """Give window groups blocks for the first `tokens` positions, as far as there are any, or
        as the full groups have room: how many positions all groups have room for."""
        reached = min(tokens, table.capacity)
        for group, _ in self._windowed:
            blocks = table.groups[group]
            count = max(0, blocks_for(reached) - len(blocks))
            self._take_loose(group, count)
            self._append(table, group, min(count, len(self.free_blocks[group])))
            reached = min(reached, len(blocks) * BLOCK_TOKENS)
        return reached

    def reserve_windows(self, table: BlockTable, tokens: int) -> bool:
        """Give window groups the blocks that the token after the first `tokens` sees; False when
        there are not enough (the caller then frees the table)."""
        self.forget(table, tokens)
        for group, window in self._windowed:
            self._pass(table, group, _first_seen(tokens, window))
        return self.reach(table, tokens) == tokens

    def sees(self, table: BlockTable, position: int) -> bool:
        """Is everything that a token at `position` sees in a block of the table?"""
        return all(
            table.passed[group] <= _first_seen(position, window) for group, window in self._windowed
        )

    # -------------------------------------------------------------- letting go

    def forget(self, table: BlockTable, computed: int) -> None:
        """Let go of what no token from position `computed` on will see."""
        for group, window in self._windowed:
            first = min(_first_seen(computed, window), len(table.groups[group]))
            for index in range(table.passed[group], first):
                self._drop(table, group, index)
                table.groups[group][index] = GONE
            table.passed[group] = max(table.passed[group], first)

    def register(self, table: BlockTable, chain: TokenChain, computed: int) -> None:
        """Offer the full blocks among the first `computed` positions to the prefix cache."""
        entries = table.chain
        while entries and not entries[-1].alive:  # a chain dies from some block to its end
            entries.pop()
        for index in range(len(entries), computed // BLOCK_TOKENS):
            if self.free_blocks[0].condemned(table.groups[0][index]):
                return
            parent = entries[-1] if entries else None
            entry = self.cache.add(chain, index, parent, self._row(table, index))
            if entry is None:
                return
            entries.append(entry)

    def free(self, table: BlockTable) -> None:
        """Let go of all blocks; `table` is empty afterwards.

        The end of a chain goes first, so that of idle blocks the shared beginnings stay longest.
        """
        for index in range(len(table) - 1, -1, -1):
            for group, _ in self._windowed:
                if table.passed[group] <= index < len(table.groups[group]):
                    self._drop(table, group, index)
            row = [table.groups[group][index] for group in self._full]
            for group, block in zip(self._full, row, strict=True):
                self._refs[group][block] -= 1
            if self._refs[0][row[0]]:
                continue
            entry = self.cache.at(row[0])
            if entry is not None:
                self.cache.rest(entry)
            else:
                for group, block in zip(self._full, row, strict=True):
                    self.free_blocks[group].give(block)
        for group, blocks in enumerate(table.groups):
            blocks.clear()
            table.passed[group] = 0
        table.chain.clear()

    def distrust(self, table: BlockTable) -> None:
        """Take everything that `table` reads out of the prefix cache: its content is in doubt."""
        if table.chain:
            self._reclaim(self.cache.discard(table.chain[0]))
        table.chain.clear()

    def condemn(self, root: bytes) -> int:
        """Forget everything cached under `root`, and let no block with content of it be used
        again before it is scrubbed (`free_blocks`); how many entries that were."""
        for free in self.free_blocks:
            free.condemn(root)
        roots = [one for one in self.cache.entries() if one.root == root and one.parent is None]
        gone = [one for entry in roots for one in self.cache.discard(entry)]
        self._reclaim(gone)
        return len(gone)

    def alone(self, table: BlockTable) -> int:
        """Blocks of group 0 that would be available if `table` were freed."""
        refs = self._refs[0]
        return sum(1 for block in table.groups[0] if refs[block] == 1)

    def take_changes(self) -> CacheChanges:
        return self.cache.take_changes()

    # -------------------------------------------------------------- inside

    def _held(self, entry: CachedBlock) -> bool:
        return self._refs[0][entry.blocks[0]] > 0

    def _span(self, window: int) -> int:
        """Blocks of a window group that a sequence needs to go on, whatever its place."""
        return blocks_for(window) + 1

    def _row(self, table: BlockTable, index: int) -> tuple[int, ...]:
        return tuple(group[index] for group in table.groups)

    def _pass(self, table: BlockTable, group: int, blocks: int) -> None:
        """The first `blocks` of a window group's empty end are never wanted."""
        missing = max(0, blocks - len(table.groups[group]))
        table.groups[group].extend([GONE] * missing)
        if missing:
            table.passed[group] = len(table.groups[group])

    def _append(self, table: BlockTable, group: int, count: int) -> None:
        for _ in range(count):
            block = self.free_blocks[group].take(table.root)
            self._refs[group][block] = 1
            table.groups[group].append(block)

    def _take_loose(self, group: int, count: int) -> None:
        """Try to have `count` free blocks in a window group, taking idle ones from entries."""
        loose, free = self._loose[group], self.free_blocks[group]
        while len(free) < count and loose:
            block, entry = loose.popitem(last=False)
            entry.lose(group)
            free.give(block)

    def _drop(self, table: BlockTable, group: int, index: int) -> None:
        """One reference to a block of a window group goes."""
        block = table.groups[group][index]
        self._refs[group][block] -= 1
        if self._refs[group][block]:
            return
        entry = self.cache.at(table.groups[0][index])
        if entry is not None and entry.blocks[group] == block:
            self._loose[group][block] = entry
        else:
            self.free_blocks[group].give(block)

    def _reclaim(self, gone: Iterable[CachedBlock]) -> None:
        """Free the blocks of entries that are no longer registered, unless somebody holds them."""
        for entry in gone:
            if not self._held(entry):
                for group in self._full:
                    self.free_blocks[group].give(entry.blocks[group])
            for group, _ in self._windowed:
                block = entry.blocks[group]
                if block in self._loose[group]:
                    del self._loose[group][block]
                    self.free_blocks[group].give(block)

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Compare all books, given every table there is. Raises InternalError with the first
        disagreement."""
        held = [[0] * n for n in self.totals]
        for table in tables:
            for group, blocks in enumerate(table.groups):
                passed = table.passed[group]
                if self.windows[group] is None and len(blocks) != len(table):
                    raise InternalError(f"group {group} of a table has {len(blocks)} blocks")
                if blocks[:passed].count(GONE) != passed or GONE in blocks[passed:]:
                    raise InternalError(f"group {group} of a table has not passed {passed} blocks")
                for block in blocks[passed:]:
                    held[group][block] += 1
        idle = self._idle_blocks()
        for group, refs in enumerate(self._refs):
            free = [0] * len(refs)
            for block in self.free_blocks[group]:
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

    def _idle_blocks(self) -> list[list[int]]:
        idle = [[0] * n for n in self.totals]
        for entry in self.cache.entries():
            if not self._held(entry):
                for group in self._full:
                    idle[group][entry.blocks[group]] += 1
        for group, loose in self._loose.items():
            for block, entry in loose.items():
                if not entry.alive or entry.blocks[group] != block:
                    raise InternalError(f"block {block} of group {group} is idle for nobody")
                idle[group][block] += 1
        return idle


def _first_seen(position: int, window: int) -> int:
    """Index of the first block that a token at `position` sees through `window`: it sees itself
    and the `window` − 1 positions before it."""
    return max(0, position - window + 1) // BLOCK_TOKENS
