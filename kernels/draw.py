"""The draw of a token by a uniform number, when the best candidates do not decide it.

Candidates are in the order (value descending, id ascending) and weigh exp((value − best) ÷
temperature). Those below min-p are left out, then all behind the first top-k, then all behind the
nucleus: the shortest beginning whose mass reaches top-p of what is left. Drawn is the first whose
cumulative mass is above the uniform number's share of the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NUMBERS = 5
"""Of each row: temperature, top-k (0: all), top-p, min-p, the uniform number; exact in double."""

Draw = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""(logits, given, wanted, ids), as `draw_by_sorting` takes them."""


def draw_by_sorting(logits: Tensor, given: Tensor, wanted: Tensor, ids: Tensor) -> None:
    """logits [rows, vocabulary] fp32, given [rows, NUMBERS] double → ids [rows] int64, of the rows
    that are `wanted` [rows] bool. Asks the host whether there are any."""
    rows = wanted.nonzero().flatten()
    if not len(rows):
        return
    temperature, top_k, top_p, min_p, point = given[rows].split_with_sizes([1] * NUMBERS, -1)
    values, order = logits[rows].sort(dim=-1, descending=True, stable=True)
    weights = ((values.double() - values[:, :1].double()) / temperature).exp_()
    places = torch.arange(logits.shape[-1], device=logits.device)
    left_out = (weights < min_p) | ((top_k > 0) & (places >= top_k))
    sums = weights.masked_fill_(left_out, 0.0).cumsum(-1)
    last = torch.searchsorted(sums, top_p * sums[:, -1:]).clamp_(max=logits.shape[-1] - 1)
    ends = (~left_out).sum(-1, keepdim=True) - 1
    last = torch.where(top_p < 1, torch.minimum(last, ends), ends)
    at = torch.searchsorted(sums, point * sums.gather(-1, last), right=True)
    ids[rows] = order.gather(-1, torch.minimum(at, last))[:, 0]
