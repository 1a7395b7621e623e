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

EACH = HEAD // 2
"""Candidates of each rank of a group."""
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
    best, columns = logits.max(-1, keepdim=True).values, logits.shape[-1]
    everyone = torch.arange(columns, device=logits.device)
    at = torch.where(logits == best, everyone, columns).min(-1).values  # the first of equals
    at = at.clamp_(max=columns - 1) + vocabulary.own.start
    told = torch.stack((best[:, 0].double(), at.double()))  # ids are exact in double
    everyone = vocabulary.group.gather(told)  # [ranks, 2, rows]
    top = everyone[:, 0].amax(0)
    ids = torch.where(everyone[:, 0] == top, everyone[:, 1], vocabulary.size).amin(0)
    return torch.where(top.isfinite(), ids.long(), UNSOUND)


def draw_together(
    logits: Tensor, given: Tensor, drawn: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """`choose` for logits that are spread as above: ids, and whether the best candidates of all
    ranks decide each row [rows] bool. Where they do not, its id means nothing."""
    ids = choose_together(logits, vocabulary)
    decided = torch.ones_like(ids, dtype=torch.bool)
    if not len(drawn):
        return ids, decided
    own, group = logits[drawn], vocabulary.group
    most = min(EACH, own.shape[-1])
    told = torch.full((2, len(own), EACH), -torch.inf, dtype=torch.float64, device=own.device)
    told[1] = vocabulary.size  # no id: behind all others
    top = own.topk(most)
    told[0, :, :most] = top.values
    told[1, :, :most] = top.indices + vocabulary.own.start
    everyone = group.gather(told)  # [ranks, 2, rows, EACH]
    values, order = everyone.permute(1, 2, 0, 3).reshape(2, len(own), -1)
    order, by_id = order.sort()
    values, by_value = values.gather(-1, by_id).sort(descending=True, stable=True)
    order = order.gather(-1, by_value).long()
    # What a rank has not sent could come as soon as the last that it has.
    short = [rank for rank, shard in enumerate(vocabulary.shards) if len(shard) > EACH]
    known = (order < vocabulary.size).sum(-1, keepdim=True)
    if short:
        known = (values > everyone[short, 0, :, -1].amax(0)[:, None]).sum(-1, keepdim=True)
    best, temperature = values[:, :1].float(), given[drawn][:, :1].float()
    every = group.gather(((own - best) / temperature).exp_().sum(-1, True, dtype=torch.float64))
    found, sure = _decide(values, order, known, every.sum(0), given[drawn], complete=not short)
    return ids.where(ids == UNSOUND, ids.index_copy(0, drawn, found)), decided.index_copy(
        0, drawn, sure
    )


def _drawn(logits: Tensor, given: Tensor, draw: Draw) -> Tensor:
    """By the best candidates, which decide nearly always."""
    if logits.shape[-1] <= HEAD:
        ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        draw(logits, given, torch.ones_like(ids, dtype=torch.bool), ids)
        return ids
    values, ids = logits.topk(HEAD)
    ids, by_id = ids.sort()  # equals by id
    values, order = values.gather(-1, by_id).sort(descending=True, stable=True)
    known = (values > values[:, -1:]).sum(-1, keepdim=True)  # equals of the last are left out
    scaled = (logits - values[:, :1]) / given[:, :1].float()
    every = scaled.exp_().sum(-1, True, dtype=torch.float64)
    found, decided = _decide(values.double(), ids.gather(-1, order), known, every, given)
    draw(logits, given, ~decided, found)
    return found


def _decide(
    values: Tensor,
    ids: Tensor,
    known: Tensor,
    every: Tensor,
    given: Tensor,
    *,
    complete: bool = False,
) -> tuple[Tensor, Tensor]:
    """The rule of `sampler.draw` for rows together. values [rows, candidates] double and their ids,
    in order, of which the first `known` [rows, 1] are the first of all; `complete`: these are all
    there are. `every` [rows, 1]: the mass of all. → ids [rows], and whether they are sure."""
    temperature, top_k, top_p, min_p, point = given.split_with_sizes([1] * NUMBERS, -1)
    width = values.shape[-1]
    weights = ((values - values[:, :1]) / temperature).exp_()
    places = torch.arange(width, device=values.device)
    count = torch.minimum(known, ((weights >= min_p) & (places < known)).sum(-1, keepdim=True))
    bounded = torch.full_like(known, complete, dtype=torch.bool) | (count < known)
    cut = (top_k > 0) & (top_k <= count)
    count = torch.where(cut, top_k.long(), count)
    bounded = bounded | cut
    decided = (count > 0) & (bounded | ((top_k == 0) & (min_p == 0)))
    sums = weights.masked_fill_(places >= count, 0.0).cumsum(-1)
    total = torch.where(bounded, sums[:, -1:], every)
    size = torch.searchsorted(sums, top_p * total) + 1
    decided &= (top_p >= 1) | bounded | (size <= count)
    nucleus = (top_p < 1) & (size <= count)
    size = torch.where(nucleus, size, count)
    total = torch.where(nucleus, sums.gather(-1, (size - 1).clamp_(0, width - 1)), total)
    at = torch.searchsorted(sums, point * total, right=True)
    decided &= (at < size) | bounded | nucleus
    at = torch.minimum(at, size - 1).clamp_(0, width - 1)
    return ids.gather(-1, at)[:, 0], decided[:, 0]
