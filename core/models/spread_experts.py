"""Experts that are spread over ranks, whole: tokens travel to them and back.

The tokens of a TP group lie on all its ranks; each takes a part of them on. A token goes once to
every rank that has some of its experts, with their numbers and weights, and one sum of what they
give comes back. Sizes are exchanged first: no token waits, is padded or is dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.models.collectives import Group
from core.models.parallel import split
from kernels.experts import Experts

_NONE = -1


class SpreadExperts:
    """A `kernels.experts.Experts` of all `count` experts; rank r of `group` has the r-th equal run,
    `local` here. What it gives on the ranks of `tensor` has to be summed, like all an MLP gives."""

    def __init__(
        self,
        local: Experts,
        *,
        count: int,
        chosen: int,
        hidden: int,
        group: Group,
        tensor: Group,
    ) -> None:
        self.count = count
        self._local = local
        self._chosen = chosen
        self._hidden = hidden
        self._group = group
        self._tensor = tensor

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        part = split(len(x), self._tensor.size, 1)[self._tensor.rank]
        own = slice(part.start, part.stop)
        out = torch.zeros_like(x)
        out[own] = self._travel(x[own], ids[own], weights[own])
        return out

    def idle(self, dtype: torch.dtype, device: torch.device) -> None:
        """A call without tokens."""
        self._travel(
            torch.empty((0, self._hidden), dtype=dtype, device=device),
            torch.empty((0, self._chosen), dtype=torch.int64, device=device),
            torch.empty((0, self._chosen), device=device),
        )

    def _travel(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        size = self._group.size
        homes = ids // (self.count // size)  # [tokens, chosen]
        wanted = torch.zeros((size, len(x)), dtype=torch.bool, device=x.device)
        wanted[homes.flatten(), torch.arange(len(x), device=x.device).repeat_interleave(
            ids.shape[1])] = True  # fmt: skip
        ranks, tokens = wanted.nonzero(as_tuple=True)  # in the order of ranks
        counts: list[int] = wanted.sum(1).tolist()
        there = homes[tokens] == ranks.unsqueeze(-1)
        numbers = torch.where(there, ids[tokens] % (self.count // size), _NONE)
        orders = torch.cat((numbers.int(), weights[tokens].view(torch.int32)), 1)
        coming, expected = self._group.exchange(orders, counts)
        rows = self._group.carry(x[tokens], counts, expected)
        summed = self._group.carry(self._computed(rows, coming), expected, counts)
        out = torch.zeros((len(x), self._hidden), device=x.device)
        return out.index_add_(0, tokens, summed.float()).to(x.dtype)

    def _computed(self, rows: Tensor, orders: Tensor) -> Tensor:
        """What the experts of this rank give for `rows`, summed for each."""
        numbers, weights = orders[:, : self._chosen], orders[:, self._chosen :]
        at, choice = (numbers != _NONE).nonzero(as_tuple=True)
        out = torch.zeros((len(rows), self._hidden), device=rows.device)
        if len(at):
            ids = numbers[at, choice].long().unsqueeze(-1)
            given = weights.contiguous().view(torch.float32)[at, choice].unsqueeze(-1)
            out.index_add_(0, at, self._local(rows[at], ids, given).float())
        return out.to(rows.dtype)
