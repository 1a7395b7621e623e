"""One tier of one pool for an event loop: a catalogue here, the bytes behind one thread.

The thread takes jobs in order, so a block that has been given a slot can be asked for before it has
been written. A tier that fails is off from then on, says so once, and fails nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from core.kv.tiers.catalogue import Catalogue, Kept, Wanted
from core.kv.tiers.entry import Entry
from core.kv.tiers.slots import Slots

log = logging.getLogger("skerry.tiers")

MOST_WAITING_BYTES = 64 << 20
"""Content that waits to be written; more is not kept."""

_T = TypeVar("_T")


@dataclass(slots=True)
class Counts:
    """Blocks since the start, but for `foreign`, which the start found."""

    written: int = 0
    loaded: int = 0
    evicted: int = 0
    refused: int = 0
    """Not kept: the disk was behind, or had no place for another namespace."""
    damaged: int = 0
    foreign: int = 0
    failed: int = 0
    """Reads and writes that the system refused."""


class Shelf:
    """`name` is host or disk. `gained` and `lost` are told of blocks that came and went, on the
    loop. Made on the loop, after `slots.found()` has been called wherever it may wait."""

    def __init__(
        self,
        name: str,
        slots: Slots,
        *,
        gained: Callable[[bytes], None],
        lost: Callable[[bytes], None],
    ) -> None:
        self.name = name
        self.counts = Counts()
        self.off = ""
        """Why nothing is written and read any more."""
        self._slots = slots
        self._gained = gained
        self._lost = lost
        self._waiting_bytes = 0
        self._thread = ThreadPoolExecutor(1, f"tier-{name}")
        self._catalogue = Catalogue(slots.count)
        found = slots.found()
        self.counts.foreign, self.counts.damaged = found.foreign, found.damaged
        self._catalogue.restore(found.kept)
        for digest in self._catalogue.digests():
            gained(digest)

    def __len__(self) -> int:
        return len(self._catalogue)

    def __contains__(self, digest: bytes) -> bool:
        return not self.off and digest in self._catalogue

    @property
    def slots(self) -> int:
        return self._slots.count

    def find(self, wanted: Wanted) -> Kept | None:
        """The entry of this hash, parent and these token ids."""
        found = () if self.off else self._catalogue.run((wanted,))
        return found[0] if found else None

    async def keep(self, entry: Entry, content: bytes) -> None:
        """Returns when it is written, or is not going to be."""
        if self.off or entry.digest in self._catalogue:
            return
        if self._waiting_bytes + len(content) > MOST_WAITING_BYTES:
            self.counts.refused += 1
            return
        placed = self._catalogue.add(entry)
        if placed is None:
            return
        self._gained(entry.digest)
        if placed.evicted is not None:
            self.counts.evicted += 1
            self._lost(placed.evicted.digest)
        self._waiting_bytes += len(content)
        try:
            written = await self._do(lambda: self._slots.write(placed.slot, entry, content))
        finally:
            self._waiting_bytes -= len(content)
        if written:
            self.counts.written += 1
        elif written is not None:
            self.counts.refused += 1
        if not written:
            self._drop(entry.digest)

    async def load(self, kept: Sequence[Kept]) -> list[bytes | None]:
        """The content of each; None for what is not there any more or does not match its check."""

        def read() -> list[bytes | None]:
            return [_checked(entry, self._slots.read(slot, entry)) for slot, entry in kept]

        contents = await self._do(read) or [None] * len(kept)
        for one, content in zip(kept, contents, strict=True):
            if content is not None:
                self.counts.loaded += 1
            elif not self.off and self._catalogue.run((_as_wanted(one.entry),)) == [one]:
                self.counts.damaged += 1
                self._drop(one.entry.digest)
                await self._do(partial(self._slots.erase, (one.slot,)))
        return contents

    def touch(self, digests: Sequence[bytes]) -> None:
        """Blocks of one chain, in order, have been used."""
        self._catalogue.touch(digests)

    async def stamp(self, digests: Sequence[bytes]) -> None:
        """As `touch`, and so that it is known after a restart."""
        self._catalogue.touch(digests)
        used = [kept for one in reversed(digests) if (kept := self._catalogue.get(one))]
        if used:
            await self._do(lambda: self._slots.touch(used))

    async def forget(self, owner: bytes) -> int:
        """Everything of one owner, for ever; how many blocks that was."""
        gone = self._catalogue.of_owner(owner)
        for one in gone:
            self._drop(one.entry.digest)
        await self._do(lambda: self._slots.shred(owner))
        return len(gone)

    async def close(self) -> None:
        """After what is under way."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._slots.close)
        self._thread.shutdown()

    def _drop(self, digest: bytes) -> None:
        if self._catalogue.drop(digest) is not None:
            self._lost(digest)

    async def _do(self, work: Callable[[], _T]) -> _T | None:
        """On the thread; None when the tier is off, or goes off by it."""
        if self.off:
            return None
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            self.counts.failed += 1
            self._end(error.strerror or str(error))
            return None

    def _end(self, why: str) -> None:
        if self.off:
            return
        self.off = why
        log.error("the %s tier is off from now on: %s", self.name, why)
        for digest in tuple(self._catalogue.digests()):
            self._drop(digest)


def _as_wanted(entry: Entry) -> Wanted:
    return Wanted(entry.digest, entry.parent, entry.token_ids)


def _checked(entry: Entry, content: bytes | None) -> bytes | None:
    same = content is not None and xxh3_64_intdigest(content) == entry.check
    return content if same else None
