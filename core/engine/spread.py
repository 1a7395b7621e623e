"""A row of logits spread over ranks, in the sampler's order: places in it by count and by mass.

The order is (value descending, id ascending). A place is found by the 32 bits of its value, four
at a time from the highest: every rank counts and weighs its candidates by those bits, and the sums
over the ranks say where to look on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from core.models.collectives import Group

_BITS = 4
"""At a time: few, for each round says two numbers for each of their values."""
_BINS = 1 << _BITS
_SIGN = 1 << 31


@dataclass(frozen=True, slots=True)
class Spot:
    """A candidate: how many there are up to it, with which mass, and which rank has it where."""

    count: int
    mass: float
    rank: int
    index: int


class SpreadRow:
    """`row` fp32: this rank's logits, ids ascending with the ranks. A candidate weighs
    exp((logit − best) / temperature). All ranks must make the same calls."""

    def __init__(self, row: Tensor, best: float, temperature: float, group: Group) -> None:
        bits = (row + 0.0).view(torch.int32).long()  # −0 counts as 0
        self._keys = torch.where(bits >= 0, bits + _SIGN, -1 - bits)
        self._weights = ((row.double() - best) / temperature).exp_()
        self._group = group

    def heavier(self, weight: float) -> int:
        """How many weigh at least `weight`."""
        own = (self._weights >= weight).sum(dtype=torch.float64)
        return int(self._group.sum(own))

    def nth(self, count: int) -> Spot:
        """The candidate with `count` up to it."""
        return self._find(lambda counts, masses: counts >= count)

    def reaching(self, mass: float) -> Spot:
        """The first with at least `mass` up to it; the last when there is less in all."""
        return self._find(lambda counts, masses: masses >= mass)

    def passing(self, mass: float) -> Spot:
        """The first with more than `mass` up to it; the last when there is none."""
        return self._find(lambda counts, masses: masses > mass)

    def _find(self, there: Callable[[Tensor, Tensor], Tensor]) -> Spot:
        """The first place where `there`(how many up to it, with which mass) holds."""
        before = torch.zeros(2, dtype=torch.float64)  # count and mass of what is larger
        inside = torch.ones_like(self._keys, dtype=torch.bool)
        for shift in range(32 - _BITS, -1, -_BITS):
            place = (_BINS - 1) - ((self._keys[inside] >> shift) & (_BINS - 1))
            bins = torch.stack((
                place.bincount(minlength=_BINS).double(),
                place.bincount(self._weights[inside], minlength=_BINS),
            ))  # fmt: skip
            sums = before.unsqueeze(-1) + self._group.sum(bins).cpu().cumsum(-1)
            chosen = _first(there(sums[0], sums[1]), sums[0])
            if chosen:
                before = sums[:, chosen - 1]
            inside[inside.clone()] = place == chosen
        return self._among_equals(before, inside, there)

    def _among_equals(
        self, before: Tensor, inside: Tensor, there: Callable[[Tensor, Tensor], Tensor]
    ) -> Spot:
        """Which of the candidates `inside`, all of one value, by id."""
        own = inside.nonzero().flatten()
        weight = self._weights[own[0]] if len(own) else self._weights.new_zeros(())
        told = torch.stack((own.new_tensor(len(own)).double(), weight))
        numbers, weights = self._group.gather(told).cpu().unbind(-1)
        upto = torch.arange(1, int(numbers.sum()) + 1, dtype=torch.float64)
        counts = before[0] + upto
        masses = before[1] + upto * weights.max()
        at = _first(there(counts, masses), counts)
        edges = numbers.cumsum(0)
        rank = int((edges <= at).sum())
        index = at - int(edges[rank] - numbers[rank])
        mine = own[index] if rank == self._group.rank else own.new_zeros(())
        return Spot(int(counts[at]), float(masses[at]), rank, int(self._group.gather(mine)[rank]))


def _first(there: Tensor, counts: Tensor) -> int:
    """Where `there` begins to hold; else the place of the last candidate."""
    holds = there.nonzero()
    if len(holds):
        return int(holds[0])
    return int((counts < counts[-1]).sum())
