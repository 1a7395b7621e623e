"""One KV group's blocks that nobody holds, and whose content each block may still have.

A block keeps what was computed into it until somebody else's takes its place. What belongs to a
chain that is *condemned* does not come back by itself: it waits, out of use, until its memory has
been overwritten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator


class FreeBlocks:
    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._owners = [b""] * count
        """The root of the chain that each block was last taken for."""
        self._condemned: set[int] = set()
        """Held or idle; they go to `_waiting` when they come back."""
        self._waiting: defaultdict[bytes, list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._free)

    def __iter__(self) -> Iterator[int]:
        """All that nobody holds, those that wait too."""
        yield from self._free
        for blocks in self._waiting.values():
            yield from blocks

    def take(self, root: bytes) -> int:
        """One of them, for a chain with this root."""
        block = self._free.pop()
        self._owners[block] = root
        return block

    def give(self, block: int) -> None:
        """It is nobody's any more."""
        if block in self._condemned:
            self._condemned.discard(block)
            self._waiting[self._owners[block]].append(block)
        else:
            self._free.append(block)

    def condemn(self, root: bytes) -> None:
        """No block with content of this chain is used again before `scrubbed`."""
        ours = {block for block, owner in enumerate(self._owners) if owner == root}
        waiting = self._waiting[root]
        free = ours.intersection(self._free)
        self._free = [block for block in self._free if block not in free]
        self._condemned |= ours - free - set(waiting)
        waiting.extend(sorted(free))

    def condemned(self, block: int) -> bool:
        return block in self._condemned

    def out(self, root: bytes) -> int:
        """Condemned blocks of this chain that somebody still has."""
        return sum(1 for block in self._condemned if self._owners[block] == root)

    def waiting(self, root: bytes) -> tuple[int, ...]:
        """Those to overwrite."""
        return tuple(self._waiting.get(root, ()))

    def scrubbed(self, root: bytes) -> None:
        """Those that wait hold nothing any more."""
        for block in self._waiting.pop(root, ()):
            self._owners[block] = b""
            self._free.append(block)
