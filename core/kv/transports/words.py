"""A word of shared memory for each transfer whose receiver reads: does the source still stand by
what it has shown?

The source changes the word first and only then lets its rank reuse the blocks. So a receiver that
has copied, and then finds the word as it was told, has copied what it was shown: however long it,
or the source, was stopped in between. Both sides do at least one system call between the two
steps, and each is a full barrier on the processors that we run on.
"""

from __future__ import annotations

import itertools
import os
from typing import NamedTuple

from core.errors import TransferFailed
from core.kv.memory import allocate

WORD_BYTES = 8
_PAGE_BYTES = 4096


class Word(NamedTuple):
    """`value` is never 0, and never the same for two transfers of one page."""

    slot: int
    value: int


class Words:
    """The words of one process, for all of its transfers."""

    def __init__(self) -> None:
        self.descriptor, self.memory = allocate(_PAGE_BYTES)
        self._view = memoryview(self.memory).cast("Q")
        self._free = list(reversed(range(len(self._view))))
        self._values = itertools.count(1)

    def publish(self) -> Word:
        """Raises TransferFailed when all words are in use."""
        if not self._free:
            raise TransferFailed(f"{len(self._view)} transfers are under way already")
        word = Word(self._free.pop(), next(self._values))
        self._view[word.slot] = word.value
        return word

    def revoke(self, word: Word) -> None:
        """From now on nothing that a receiver reads counts. May be called more than once."""
        if self._view[word.slot] == word.value:
            self._view[word.slot] = 0
            self._free.append(word.slot)

    def close(self) -> None:
        """The memory itself lives as long as somebody has mapped it."""
        os.close(self.descriptor)


def stands(words: memoryview, word: Word) -> bool:
    """`words`: the source's page, cast to "Q"."""
    found: int = words[word.slot]
    return found == word.value
