"""Sampling that asks the host nothing: the same choices as `core.engine.sampler`, rows together.

Only for rows that need no shaping and report no scores. What is random is a number that the host
knows beforehand, since it depends on (seed, choice, output position) alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.engine.plan import SampleSpec
from core.engine.sampler import COLDEST, greedy, uniform
from core.engine.shaping import shapes

NUMBERS = 5
"""Of each row: temperature, top-k, top-p, min-p, the uniform number; all exact in double."""
UNSOUND = -1
"""In place of a token whose logits are not finite."""


def plain(spec: SampleSpec) -> bool:
    """Can `choose` do it?"""
    return spec.logprobs is None and not spec.grammar and not shapes(spec)


def numbers(specs: Sequence[SampleSpec]) -> Tensor:
    """[rows, NUMBERS] double, on the host."""
    return torch.tensor(
        [
            (
                max(spec.temperature, COLDEST),
                spec.top_k,
                spec.top_p,
                spec.min_p,
                uniform(spec.seed, spec.choice, spec.position),
            )
            for spec in specs
        ],
        dtype=torch.float64,
    ).view(-1, NUMBERS)


def random_rows(specs: Sequence[SampleSpec]) -> Tensor:
    """int64, on the host: the rows that do not just take their best."""
    return torch.tensor([row for row, spec in enumerate(specs) if not greedy(spec)]).long()


def choose(logits: Tensor, given: Tensor, drawn: Tensor) -> Tensor:
    """logits [rows, vocabulary] fp32, `given` as `numbers` and `drawn` as `random_rows` make them
    → ids [rows] int64, UNSOUND where no number of the row is the largest."""
    best = logits.max(-1, keepdim=True).values
    everyone = torch.arange(logits.shape[-1], device=logits.device)
    ids = (
        torch.where(logits == best, everyone, logits.shape[-1]).min(-1).values
    )  # the first of equals
    if len(drawn):
        ids = ids.index_copy(0, drawn, _draw(logits[drawn], given[drawn]))
    return torch.where(best[:, 0].isfinite(), ids, UNSOUND)


def _draw(logits: Tensor, given: Tensor) -> Tensor:
    """Sorts the whole vocabulary: there is no asking whether a part of it is enough."""
    temperature, top_k, top_p, min_p, point = given.split_with_sizes([1] * NUMBERS, -1)
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    weights = ((values.double() - values[:, :1].double()) / temperature).exp_()
    places = torch.arange(logits.shape[-1], device=logits.device)
    left_out = (weights < min_p) | ((top_k > 0) & (places >= top_k))
    sums = weights.masked_fill_(left_out, 0.0).cumsum(-1)
    # the nucleus: the shortest beginning whose mass reaches top_p
    last = torch.searchsorted(sums, top_p * sums[:, -1:]).clamp_(max=logits.shape[-1] - 1)
    ends = (~left_out).sum(-1, keepdim=True) - 1
    last = torch.where(top_p < 1, torch.minimum(last, ends), ends)
    at = torch.searchsorted(sums, point * sums.gather(-1, last), right=True)
    return order.gather(-1, torch.minimum(at, last))[:, 0]
