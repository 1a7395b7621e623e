"""From logits to tokens, one row at a time, so that no row's choice depends on its neighbours.

Candidates are sorted by (log probability descending, id ascending); a uniform number that is a
function of (seed, choice, output position) alone picks from their cumulative distribution. The
order of filters: temperature, top-k, then top-p over what is left, at least one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.engine.plan import SampleSpec

HEAD = 256
"""Candidates looked at before the whole vocabulary is sorted; nearly every draw falls in here."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1), of 53 bits; the same on every machine (SplitMix64 steps over the three)."""
    state = 0
    for part in (seed, choice, position):
        state = _mix((state + (part & _MASK) + _GOLDEN) & _MASK)
    return (_mix((state + _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[int | None]:
    """One token per row of `logits` [rows, vocabulary] fp32; None where a row is not finite."""
    if not specs:
        return []
    best, best_ids = logits.max(-1)
    picked: list[int | None] = []
    sound, ids = best.isfinite().tolist(), best_ids.tolist()
    for row, spec in enumerate(specs):
        if not sound[row]:
            picked.append(None)
        elif spec.temperature == 0 or spec.top_p <= 0 or spec.top_k == 1:
            picked.append(ids[row])
        else:
            point = uniform(spec.seed, spec.choice, spec.position)
            picked.append(_draw(logits[row], float(best[row]), spec, point))
    return picked


def _draw(logits: Tensor, best: float, spec: SampleSpec, point: float) -> int:
    """The candidate at `point` of the filtered cumulative distribution."""
    # Differences to the best one are ≤ 0 before the division: a tiny temperature gives −inf and
    # a weight of 0, never inf − inf.
    weights = ((logits.double() - best) / spec.temperature).exp_()
    vocabulary = weights.shape[0]
    limit = min(spec.top_k, vocabulary) if spec.top_k > 0 else vocabulary
    if vocabulary > HEAD:
        found = _locate(weights, _head(logits, HEAD)[:limit], limit, spec.top_p, point)
        if found is not None:
            return found
    ids = logits.sort(descending=True, stable=True).indices[:limit]
    found = _locate(weights, ids, limit, spec.top_p, point)
    assert found is not None, "the whole order holds every draw"
    return found


def _head(logits: Tensor, count: int) -> Tensor:
    """The best ids in order, without those that tie with the first one left out."""
    values, ids = logits.topk(count)
    whole = int((values > values[-1]).sum())
    ids, by_id = ids[:whole].sort()
    return ids[values[by_id].sort(descending=True, stable=True).indices]


def _locate(weights: Tensor, ids: Tensor, limit: int, top_p: float, point: float) -> int | None:
    """`ids` are the first candidates in order, `limit` is how many there are in all.

    None when these are too few to tell.
    """
    complete = len(ids) == limit
    if not complete and (limit < len(weights) or not len(ids)):
        return None  # the mass of the best `limit` is not known
    mass = weights[ids].cumsum(0)
    total = mass[-1] if limit < len(weights) else weights.sum()
    if top_p < 1:  # the nucleus: the shortest head whose mass reaches top_p
        size = int(torch.searchsorted(mass, top_p * total)) + 1
        if size > len(ids) and not complete:
            return None
        mass = mass[:size]
        total = mass[-1]
        complete = True
    at = int(torch.searchsorted(mass, point * total, right=True))
    if at < len(mass):
        return int(ids[at])
    return int(ids[len(mass) - 1]) if complete else None
