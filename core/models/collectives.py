"""What ranks that compute a layer together need from each other. The models know only this seam.

Bytes are counted as the least traffic that does the same would have them: for a sum over n ranks
every rank sends 2·(n−1)/n of the tensor, to gather its own part to the n−1 others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Some ranks of a stage, all of which make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """From 0 to `size` − 1."""
        ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, of one shape on all of them. `x` is overwritten and returned."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[size, …]: what each rank gave, all of one shape."""
        ...

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
        """Rows [n, …] for the ranks in order, `counts[r]` of them for rank r → rows from the ranks
        in order, and how many each one sent. Sizes go ahead, so nothing is padded or dropped."""
        ...

    def carry(self, rows: Tensor, counts: Sequence[int], expected: Sequence[int]) -> Tensor:
        """An `exchange` where both sides know the numbers: `expected[r]` rows come from rank r."""
        ...


class Alone:
    """A `Group` of one rank."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
        return rows, tuple(counts)

    def carry(self, rows: Tensor, counts: Sequence[int], expected: Sequence[int]) -> Tensor:
        return rows
