"""Sampling that asks the host nothing: the same choices as `core.engine.sampler`, rows together.

Only for rows that need no shaping and report no scores. What is random is a number that the host
knows beforehand, since it depends on (seed, choice, output position) alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.engine.plan import SampleSpec
from core.engine.sampler import COLDEST, HEAD, greedy, uniform
from core.engine.sampler_split import Vocabulary
from core.engine.shaping import shapes
from kernels.draw import NUMBERS, Draw, draw_by_sorting

UNSOUND = -1
"""In place of a token whose logits are not finite."""


def plain(spec: SampleSpec) -> bool:
    """Can `choose` do it?"""
    return spec.logprobs is None and not spec.grammar and not shapes(spec)


def numbers(specs: Sequence[SampleSpec]) -> Tensor:
    """[rows, NUMBERS] double, on the host (see kernels.draw)."""
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


def choose(logits: Tensor, given: Tensor, drawn: Tensor, draw: Draw = draw_by_sorting) -> Tensor:
    """logits [rows, vocabulary] fp32, `given` as `numbers` and `drawn` as `random_rows` make them
    → ids [rows] int64, UNSOUND where no number of the row is the largest. `draw` is for rows that
    their best candidates do not decide."""
    best = logits.max(-1, keepdim=True).values
    everyone = torch.arange(logits.shape[-1], device=logits.device)
    ids = (
        torch.where(logits == best, everyone, logits.shape[-1]).min(-1).values
    )  # the first of equals
    if len(drawn):
        ids = ids.index_copy(0, drawn, _drawn(logits[drawn], given[drawn], draw))
    return torch.where(best[:, 0].isfinite(), ids, UNSOUND)


def choose_together(logits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """The best id of each row, whose logits [rows, own ids] are spread over the ranks of a group;
    the same on all of them. → ids [rows] int64, UNSOUND as above."""
    best, at = logits.max(-1)
    # the first of equals, whatever the device takes: ids are exact in double
    at = (
        torch.where(
            logits == best[:, None],
            torch.arange(logits.shape[-1], device=logits.device),
            logits.shape[-1],
        )
        .min(-1)
        .values.clamp_(max=logits.shape[-1] - 1)
    )
    told = torch.stack((best.double(), (at + vocabulary.own.start).double()))
    everyone = vocabulary.group.gather(told)  # [ranks, 2, rows]
    top = everyone[:, 0].amax(0)
    ids = torch.where(everyone[:, 0] == top, everyone[:, 1], vocabulary.size).amin(0)
    return torch.where(top.isfinite(), ids.long(), UNSOUND)


def _drawn(logits: Tensor, given: Tensor, draw: Draw) -> Tensor:
    """By the best candidates, which decide nearly always; the rule is `sampler.draw`'s."""
    if logits.shape[-1] <= HEAD:
        ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        draw(logits, given, torch.ones_like(ids, dtype=torch.bool), ids)
        return ids
    temperature, top_k, top_p, min_p, point = given.split_with_sizes([1] * NUMBERS, -1)
    values, ids = logits.topk(HEAD)
    ids, by_id = ids.sort()  # equals by id
    values, order = values.gather(-1, by_id).sort(descending=True, stable=True)
    ids = ids.gather(-1, order)
    best = values[:, :1]
    known = (values > values[:, -1:]).sum(-1, keepdim=True)  # equals of the last are left out
    weights = ((values.double() - best.double()) / temperature).exp_()
    places = torch.arange(HEAD, device=logits.device)
    count = torch.minimum(known, ((weights >= min_p) & (places < known)).sum(-1, keepdim=True))
    bounded = count < known
    cut = (top_k > 0) & (top_k <= count)
    count = torch.where(cut, top_k.long(), count)
    bounded = bounded | cut
    decided = (count > 0) & (bounded | ((top_k == 0) & (min_p == 0)))
    sums = weights.masked_fill_(places >= count, 0.0).cumsum(-1)
    every = ((logits - best) / temperature.float()).exp_().sum(-1, True, dtype=torch.float64)
    total = torch.where(bounded, sums[:, -1:], every)
    size = torch.searchsorted(sums, top_p * total) + 1
    decided &= (top_p >= 1) | bounded | (size <= count)
    nucleus = (top_p < 1) & (size <= count)
    size = torch.where(nucleus, size, count)
    total = torch.where(nucleus, sums.gather(-1, (size - 1).clamp_(0, HEAD - 1)), total)
    at = torch.searchsorted(sums, point * total, right=True)
    decided &= (at < size) | bounded | nucleus
    at = torch.minimum(at, size - 1).clamp_(0, HEAD - 1)
    found = ids.gather(-1, at)[:, 0]
    draw(logits, given, ~decided[:, 0], found)
    return found
