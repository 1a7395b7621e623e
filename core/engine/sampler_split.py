"""Sampling from logits whose vocabulary is spread over the ranks of a group: `sampler`'s rule, and
every rank comes to the same token. No rank ever sees the logits of another.

Ranks exchange, for each row, their best value and id; for a row that is drawn also their best
candidates and the mass of all they have. When the draw falls behind the candidates, its place is
found by the values' bits, four at a time, from counts and masses alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from core.engine.allowed import Allowed
from core.engine.plan import IMPOSSIBLE, SampleSpec, Scores
from core.engine.sampler import (
    COLDEST,
    HEAD,
    NOTHING,
    Head,
    Sampled,
    draw,
    first_ids,
    greedy,
    mass,
    uniform,
)
from core.engine.shaping import shape, shapes
from core.engine.spread import SpreadRow
from core.models.collectives import Group

_CANDIDATES = HEAD // 2
"""Of all ranks together. Fewer than one rank alone looks at, for they are sent."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which ids each rank of `group` has, in order."""

    shards: tuple[range, ...]
    group: Group

    @property
    def own(self) -> range:
        return self.shards[self.group.rank]

    @property
    def size(self) -> int:
        return self.shards[-1].stop


def sample(
    logits: Tensor,
    specs: Sequence[SampleSpec],
    vocabulary: Vocabulary,
    allowed: Mapping[int, Allowed] = NOTHING,
) -> list[Sampled | None]:
    """See `sampler.sample`; `logits` [rows, own ids] fp32, `allowed` of all ids. All ranks must
    call it with the same specs."""
    if not specs:
        return []
    best, best_at = logits.max(-1)
    raws: dict[int, Tensor] = {}
    told = torch.zeros((4, len(specs)), dtype=torch.float64, device=logits.device)
    told[0] = best
    for row, spec in enumerate(specs):
        if spec.logprobs is not None:
            raws[row] = logits[row].clone()
            if torch.isfinite(best[row]):
                told[3, row] = mass(raws[row], float(best[row]), 1.0)
        if (row in allowed or shapes(spec)) and best[row] < torch.inf:
            shape(logits[row], spec, vocabulary.own.start, allowed.get(row))
            best[row], best_at[row] = logits[row].max(-1)
    told[1] = best
    told[2] = best_at + vocabulary.own.start
    everyone = vocabulary.group.gather(told)  # [ranks, 4, rows]
    raw_best = everyone[:, 0].amax(0)
    tops, holders = everyone[:, 1].max(0)  # of equals the first, which has the lowest ids
    ids = everyone[:, 2].gather(0, holders.unsqueeze(0))[0].long().tolist()
    sound = (raw_best.isfinite() & tops.isfinite()).tolist()
    best_values = tops.tolist()
    drawn = [row for row, spec in enumerate(specs) if sound[row] and not greedy(spec)]
    tokens = dict(zip(drawn, _draw_all(logits, best_values, drawn, specs, vocabulary), strict=True))
    picked = [tokens.get(row, ids[row]) for row in range(len(specs))]
    totals = _log_totals(everyone[:, 0], everyone[:, 3], raw_best)
    asked = [row for row in raws if sound[row]]
    scores = _scores(raws, asked, picked, specs, totals, vocabulary)
    return [
        Sampled(token, scores.get(row)) if sound[row] else None for row, token in enumerate(picked)
    ]


def _draw_all(
    logits: Tensor,
    best: Sequence[float],
    drawn: Sequence[int],
    specs: Sequence[SampleSpec],
    vocabulary: Vocabulary,
) -> list[int]:
    if not drawn:
        return []
    group, shards = vocabulary.group, vocabulary.shards
    count = -(-_CANDIDATES // group.size)
    most = min(count, logits.shape[-1])
    values = logits.new_full((len(drawn), count), -torch.inf)
    ids = torch.zeros((len(drawn), count), dtype=torch.int32, device=logits.device)
    top = logits[list(drawn)].topk(most)
    values[:, :most] = top.values
    ids[:, :most] = top.indices + vocabulary.own.start
    masses = torch.stack(
        [mass(logits[row], best[row], max(specs[row].temperature, COLDEST)) for row in drawn]
    )
    sent = torch.cat([masses.view(torch.uint8), _bytes(values), _bytes(ids)])
    all_sent = group.gather(sent)
    edges = (masses.nbytes, masses.nbytes + values.nbytes)
    all_masses = all_sent[:, : edges[0]].contiguous().view(torch.float64).sum(0)
    all_values = all_sent[:, edges[0] : edges[1]].contiguous().view(torch.float32)
    all_ids = all_sent[:, edges[1] :].contiguous().view(torch.int32)
    found = []
    for at, row in enumerate(drawn):
        place = slice(at * count, (at + 1) * count)
        head = _merged(all_values[:, place], all_ids[:, place], shards)
        total = all_masses[at]
        token = draw(head, best[row], specs[row], partial(_same, total))
        if token is None:
            token = _behind(logits[row], best[row], specs[row], float(total), vocabulary)
        found.append(token)
    return found


def _same(total: Tensor, _: float) -> Tensor:
    """The mass was summed at the row's own temperature."""
    return total


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _merged(values: Tensor, ids: Tensor, shards: Sequence[range]) -> Head:
    """The beginning of the order of all ranks' candidates [ranks, count], as far as nothing that a
    rank did not send could come before it."""
    count = values.shape[1]
    short = [rank for rank, shard in enumerate(shards) if len(shard) > count]
    keep = torch.ones_like(values, dtype=torch.bool)
    for rank, shard in enumerate(shards):
        keep[rank, len(shard) :] = False
    if short:
        keep &= values > values[short, -1].max()
    ids, by_id = ids[keep].sort()
    values, order = values[keep][by_id].sort(descending=True, stable=True)
    return Head(values, ids[order], complete=not short)


def _behind(
    row: Tensor, best: float, spec: SampleSpec, total: float, vocabulary: Vocabulary
) -> int:
    """The draw by search, when the candidates do not reach far enough. `total`: of all masses."""
    spread = SpreadRow(row, best, max(spec.temperature, COLDEST), vocabulary.group)
    count = vocabulary.size
    if spec.min_p > 0:
        count = spread.heavier(spec.min_p)
    if 0 < spec.top_k < count:
        count = spec.top_k
    last = spread.nth(count) if count < vocabulary.size else None
    reached = total if last is None else last.mass
    if spec.top_p < 1:
        nucleus = spread.reaching(spec.top_p * reached)
        if last is None or nucleus.count < last.count:
            last, reached = nucleus, nucleus.mass
    point = uniform(spec.seed, spec.choice, spec.position)
    picked = spread.passing(point * reached)
    if last is not None and picked.count > last.count:
        picked = last
    return vocabulary.shards[picked.rank].start + picked.index


def _log_totals(bests: Tensor, masses: Tensor, best: Tensor) -> list[float]:
    """log Σ exp(logit) of each row, from each rank's best and its mass relative to that."""
    scaled = torch.where(masses > 0, masses * (bests - best).exp(), 0.0)
    totals: list[float] = (best + scaled.sum(0).log()).tolist()
    return totals


def _scores(
    raws: dict[int, Tensor],
    asked: Sequence[int],
    picked: Sequence[int],
    specs: Sequence[SampleSpec],
    totals: Sequence[float],
    vocabulary: Vocabulary,
) -> dict[int, Scores]:
    """Of the rows that ask for log probabilities: the token's logit comes from the rank that has
    it, the best candidates from all."""
    if not asked:
        return {}
    own = vocabulary.own
    counts = [min(specs[row].logprobs or 0, vocabulary.size) for row in asked]
    told = torch.full((len(asked), 1 + 2 * max(counts)), -torch.inf, dtype=torch.float64)
    for at, (row, count) in enumerate(zip(asked, counts, strict=True)):
        raw = raws[row]
        if picked[row] in own:
            told[at, 0] = raw[picked[row] - own.start]
        ids = first_ids(raw, min(count, len(raw)))
        told[at, 1 : 1 + len(ids)] = raw[ids]
        told[at, 1 + max(counts) : 1 + max(counts) + len(ids)] = (ids + own.start).double()
    everyone = vocabulary.group.gather(told.to(raws[asked[0]].device)).cpu()
    found = {}
    for at, (row, count) in enumerate(zip(asked, counts, strict=True)):
        values = everyone[:, at, 1 : 1 + max(counts)].flatten()
        ids = everyone[:, at, 1 + max(counts) :].flatten()
        there = ids >= 0  # what a rank has not is −∞
        ids, by_id = ids[there].sort()
        values, order = values[there][by_id].sort(descending=True, stable=True)
        total = totals[row]
        found[row] = Scores(
            _reported(float(everyone[:, at, 0].max()) - total),
            tuple(int(token) for token in ids[order][:count].tolist()),
            tuple(_reported(value - total) for value in values[:count].tolist()),
        )
    return found


def _reported(logprob: float) -> float:
    return min(0.0, max(IMPOSSIBLE, logprob))
