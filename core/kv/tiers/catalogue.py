"""Which blocks a tier holds, and which of them goes when another comes. Pure.

Blocks go in order of last use. A chain is touched from its end, so that of two blocks of one chain
the later one goes first: a beginning serves more prompts than what follows it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from core.kv.tiers.entry import Entry


class Kept(NamedTuple):
    slot: int
    entry: Entry


class Wanted(NamedTuple):
    """One block of a prompt, as an entry has to have it."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]


class Placed(NamedTuple):
    """A slot for a newcomer, and who had it before."""

    slot: int
    evicted: Entry | None


class Catalogue:
    """`slots` places, numbered from 0."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        """By digest, the one that was not used for longest first."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    def restore(self, kept: Iterable[Kept]) -> None:
        """Take in what lay in the slots before a restart, in order of last use. Of what is there
        twice the later one stays."""
        for one in kept:
            self._kept.pop(one.entry.digest, None)
            self._kept[one.entry.digest] = one
        used = {one.slot for one in self._kept.values()}
        self._free = [slot for slot in range(self._slots - 1, -1, -1) if slot not in used]

    def run(self, wanted: Sequence[Wanted]) -> list[Kept]:
        """The entries of the longest start of `wanted` that is here, by hash and by content."""
        found: list[Kept] = []
        for one in wanted:
            kept = self._kept.get(one.digest)
            if kept is None:
                break
            entry = kept.entry
            if entry.parent != one.parent or entry.token_ids != one.token_ids:
                break
            found.append(kept)
        return found

    def get(self, digest: bytes) -> Kept | None:
        return self._kept.get(digest)

    def touch(self, digests: Sequence[bytes]) -> None:
        """Blocks of one chain, in order, have been used."""
        for digest in reversed(digests):
            if digest in self._kept:
                self._kept.move_to_end(digest)

    def add(self, entry: Entry) -> Placed | None:
        """A place for `entry`; None when it is here already."""
        if entry.digest in self._kept or not self._slots:
            return None
        evicted: Entry | None = None
        if self._free:
            slot = self._free.pop()
        else:
            _, (slot, evicted) = self._kept.popitem(last=False)
        self._kept[entry.digest] = Kept(slot, entry)
        return Placed(slot, evicted)

    def drop(self, digest: bytes) -> Kept | None:
        """Its slot is free."""
        kept = self._kept.pop(digest, None)
        if kept is not None:
            self._free.append(kept.slot)
        return kept

    def of_owner(self, owner: bytes) -> list[Kept]:
        return [one for one in self._kept.values() if one.entry.owner == owner]

    def digests(self) -> Iterator[bytes]:
        return iter(self._kept)
