"""Slots in this process's own memory: what a GPU node keeps beside its device's pool.

The content is as safe as the pool itself, so nothing is encrypted, and it goes with the process.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from core.kv.tiers.catalogue import Kept
from core.kv.tiers.entry import Entry
from core.kv.tiers.shape import Shape
from core.kv.tiers.slots import Found


class HostSlots:
    """See `slots.Slots`. Takes at most `most_bytes`, page by page as it fills."""

    def __init__(self, shape: Shape, most_bytes: int) -> None:
        self._shape = shape
        self._size = shape.block_bytes
        self._count = most_bytes // self._size
        self._memory = mmap.mmap(-1, max(1, self._count * self._size))
        self._entries: dict[int, Entry] = {}

    @property
    def count(self) -> int:
        return self._count

    def found(self) -> Found:
        return Found()

    def write(self, slot: int, entry: Entry, content: bytes | bytearray) -> bool:
        start = slot * self._size
        self._memory[start : start + len(content)] = bytes(content)
        self._entries[slot] = entry
        return True

    def read(self, slot: int, entry: Entry) -> bytes | None:
        if self._entries.get(slot) != entry:
            return None
        start = slot * self._size
        return self._memory[start : start + self._shape.size(entry.groups)]

    def touch(self, kept: Sequence[Kept]) -> None:
        """Order is the catalogue's, and goes with it."""

    def erase(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._memory[slot * self._size : (slot + 1) * self._size] = bytes(self._size)
            self._entries.pop(slot, None)

    def shred(self, owner: bytes) -> None:
        self.erase([slot for slot, entry in self._entries.items() if entry.owner == owner])

    def close(self) -> None:
        self._memory.close()
