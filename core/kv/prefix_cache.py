"""Which computed blocks can be used again, and which of them goes first when memory is short.

An entry is one full block of 16 tokens at one place of one chain: it knows its parent entry, its
token ids and the pool block of every KV group that still holds it. The chain hash only finds an
entry; identity is (root, parent entry, token ids), compared each time, so two contents with one
hash cannot be taken for each other.

Rules: an entry is registered once; who computes the same block at the same time keeps its own copy
unregistered. A child lives no longer than its parent: an entry that goes takes its descendants
along, so whatever is registered can be reached from the root. Entries that nobody holds wait in
order of last use; only they are evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from core.errors import InternalError
from core.prefix import next_block_hash
from core.types import BLOCK_TOKENS

GONE = -1
"""Stands for a block that a window group no longer has."""

Hasher = Callable[[bytes, Sequence[int]], bytes]


class TokenChain:
    """The block hashes of one growing list of token ids, each computed once.

    `token_ids` stays the caller's: it may be appended to, never changed.
    """

    __slots__ = ("_digests", "_hasher", "_token_ids", "root")

    def __init__(
        self, root: bytes, token_ids: Sequence[int], hasher: Hasher = next_block_hash
    ) -> None:
        self.root = root
        self._token_ids = token_ids
        self._hasher = hasher
        self._digests: list[bytes] = []

    def block(self, index: int) -> tuple[int, ...]:
        """The 16 token ids of full block `index`."""
        return tuple(self._token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS])

    def digest(self, index: int) -> bytes:
        while len(self._digests) <= index:
            parent = self._digests[-1] if self._digests else self.root
            self._digests.append(self._hasher(parent, self.block(len(self._digests))))
        return self._digests[index]


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One registered block. `blocks` has one pool block per KV group, or GONE."""

    digest: bytes
    root: bytes
    parent: CachedBlock | None
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    children: set[CachedBlock] = field(default_factory=set)
    alive: bool = True

    def lose(self, group: int) -> None:
        """Somebody else uses this entry's block of a window group from now on."""
        self.blocks = (*self.blocks[:group], GONE, *self.blocks[group + 1 :])


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Net changes since the last look, in order; evictions are to be applied first."""

    stored: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class PrefixCache:
    def __init__(self) -> None:
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}  # keyed by the block of group 0
        self._idle: OrderedDict[CachedBlock, None] = OrderedDict()  # oldest first
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    @property
    def idle(self) -> int:
        """Entries that nobody holds."""
        return len(self._idle)

    def entries(self) -> Iterator[CachedBlock]:
        return iter(self._by_digest.values())

    def find(self, chain: TokenChain, most: int) -> list[CachedBlock]:
        """The longest registered start of `chain`, at most `most` blocks."""
        found: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for index in range(most):
            entry = self._by_digest.get(chain.digest(index))
            if entry is None or not _is(entry, chain, index, parent):
                break
            found.append(entry)
            parent = entry
        return found

    def add(
        self, chain: TokenChain, index: int, parent: CachedBlock | None, blocks: tuple[int, ...]
    ) -> CachedBlock | None:
        """Register block `index` of `chain`, or give the entry that is there already.

        None when another content has the same hash: then this one stays unregistered.
        The new entry counts as held; see `rest`.
        """
        digest = chain.digest(index)
        known = self._by_digest.get(digest)
        if known is not None:
            return known if _is(known, chain, index, parent) else None
        entry = CachedBlock(digest, chain.root, parent, chain.block(index), blocks)
        self._by_digest[digest] = entry
        self._by_block[blocks[0]] = entry
        if parent is not None:
            parent.children.add(entry)
        self._stored[digest] = None
        return entry

    def at(self, block: int) -> CachedBlock | None:
        """The entry whose group 0 lies in `block`."""
        return self._by_block.get(block)

    def rest(self, entry: CachedBlock) -> None:
        """Nobody holds `entry` any more: it is the last to be evicted."""
        self._idle[entry] = None

    def wake(self, entry: CachedBlock) -> None:
        """An idle `entry` is held again."""
        del self._idle[entry]

    def evict(self) -> list[CachedBlock]:
        """Drop the entry that was idle longest, with its descendants; all that went."""
        return self.discard(next(iter(self._idle)))

    def discard(self, entry: CachedBlock) -> list[CachedBlock]:
        """Drop `entry` and its descendants, held or not; all that went. The caller frees the
        blocks of those that nobody holds."""
        if not entry.alive:
            return []
        gone: list[CachedBlock] = []
        pending = [entry]
        while pending:
            one = pending.pop()
            pending.extend(one.children)
            one.alive = False
            one.children.clear()
            del self._by_digest[one.digest]
            del self._by_block[one.blocks[0]]
            self._idle.pop(one, None)
            if one.digest in self._stored:
                del self._stored[one.digest]
            else:
                self._evicted[one.digest] = None
            gone.append(one)
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        return gone

    def take_changes(self) -> CacheChanges:
        changes = CacheChanges(tuple(self._stored), tuple(self._evicted))
        self._stored = {}
        self._evicted = {}
        return changes

    def check_integrity(self, held: Callable[[CachedBlock], bool]) -> None:
        """Raise InternalError with the first disagreement. `held` tells whether anyone holds the
        blocks of an entry."""
        for digest, entry in self._by_digest.items():
            name = f"cached block {digest.hex()[:12]} in {entry.blocks}"
            if not entry.alive or entry.digest != digest:
                raise InternalError(f"{name} is listed under a hash that is not its own")
            if self._by_block.get(entry.blocks[0]) is not entry:
                raise InternalError(f"{name} is not found by its pool block")
            if len(entry.token_ids) != BLOCK_TOKENS:
                raise InternalError(f"{name} has {len(entry.token_ids)} tokens")
            parent = entry.parent
            if parent is not None and (not parent.alive or entry not in parent.children):
                raise InternalError(f"{name} hangs on a parent that is gone")
            if held(entry) == (entry in self._idle):
                where = "idle" if entry in self._idle else "in use"
                raise InternalError(f"{name} counts as {where}, its references say otherwise")
        if len(self._by_block) != len(self._by_digest):
            raise InternalError("the cache lists a pool block twice or without its entry")
        for entry in self._idle:
            if self._by_digest.get(entry.digest) is not entry:
                raise InternalError(f"an idle entry in {entry.blocks} is not registered")


def _is(entry: CachedBlock, chain: TokenChain, index: int, parent: CachedBlock | None) -> bool:
    return (
        entry.parent is parent
        and entry.root == chain.root
        and entry.token_ids == chain.block(index)
    )
