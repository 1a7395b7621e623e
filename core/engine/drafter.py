"""Guesses at what an answer says next, for the model to check several tokens in one pass.

A guess costs nothing but time: what counts is always what the model would have said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_SIZES = (4, 2)
"""Lengths of the token groups that are looked up, the surest first."""
_MOST_ENTRIES = 4096
"""Groups remembered of each length, for each sequence: half a megabyte together."""


class Drafter(Protocol):
    """Guesses for one sequence, whose tokens are appended to and never changed."""

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """What may follow `tokens`, at most `most`; () when there is no idea."""
        ...


class PromptLookup:
    """What followed the last time that the same few tokens stood in prompt or answer."""

    def __init__(self, *, most_entries: int = _MOST_ENTRIES) -> None:
        self._most_entries = most_entries
        self._follows: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in _SIZES}
        self._indexed = 0
        """Groups that end before this place are in."""

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        self._index(tokens)
        end = len(tokens)
        for size in _SIZES:
            if end <= size:
                continue
            at = self._follows[size].get(tuple(tokens[end - size :]))
            if at is not None:
                return _copy(tokens, at, most)
        return ()

    def _index(self, tokens: Sequence[int]) -> None:
        """The group at the very end is left for next time: nothing follows it yet."""
        first = max(self._indexed, len(tokens) - self._most_entries)
        for size, follows in self._follows.items():
            for end in range(max(first, size), len(tokens)):
                group = tuple(tokens[end - size : end])
                follows.pop(group, None)  # to the end: the first is the one not seen for longest
                follows[group] = end
                if len(follows) > self._most_entries:
                    del follows[next(iter(follows))]
        self._indexed = max(self._indexed, len(tokens))


def _copy(tokens: Sequence[int], at: int, most: int) -> tuple[int, ...]:
    """`most` tokens from place `at` on; what repeats itself goes on repeating past the end."""
    period = len(tokens) - at
    return tuple(tokens[at + n % period] for n in range(most))
