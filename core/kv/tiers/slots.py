"""The seam to where a tier's bytes lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.kv.tiers.catalogue import Kept
from core.kv.tiers.entry import Entry


@dataclass(frozen=True, slots=True)
class Found:
    """What was there at the start. `kept` is in order of last use. `foreign`: entries of another
    model, key or version; `damaged`: entries that do not open."""

    kept: tuple[Kept, ...] = ()
    foreign: int = 0
    damaged: int = 0


class Slots(Protocol):
    """`count` places of one block each. Used by one thread at a time; every method may raise
    OSError."""

    @property
    def count(self) -> int: ...

    def found(self) -> Found: ...

    def write(self, slot: int, entry: Entry, content: bytes | bytearray) -> bool:
        """Replaces what was there. False: nothing of this owner can be kept."""
        ...

    def read(self, slot: int, entry: Entry) -> bytes | None:
        """The content of `entry`; None when it is not there any more, or damaged."""
        ...

    def touch(self, kept: Sequence[Kept]) -> None:
        """They have been used, the last of them latest."""
        ...

    def erase(self, slots: Sequence[int]) -> None: ...

    def shred(self, owner: bytes) -> None:
        """Make unreadable for ever whatever was written for `owner`."""
        ...

    def close(self) -> None: ...
