"""From logits to tokens, one row at a time, so that no row's choice depends on its neighbours.

Order, which is that of vLLM's documented sampler: (1) log probabilities to report are read from the
logits as the model gave them; (2) `shaping`: forbidden ids, bias, penalties; (3) temperature;
(4) min-p, then top-k, then top-p over what is left, at least one token; (5) the draw. Candidates
are sorted by (log probability descending, id ascending), so each filter keeps a beginning of the
order; a uniform number that is a function of (seed, choice, output position) alone picks from
their cumulative distribution.

Arithmetic runs row by row and in pieces that are never split between threads: the same logits give
the same token, whatever the batch and the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from core.engine.allowed import Allowed
from core.engine.plan import IMPOSSIBLE, SampleSpec, Scores
from core.engine.shaping import shape, shapes

HEAD = 256
"""Candidates looked at first; nearly every draw falls in here."""
LONG_HEAD = 4096
"""Looked at before the whole vocabulary is sorted."""

NOTHING: Mapping[int, Allowed] = MappingProxyType({})
COLDEST = 1e-20
"""A temperature below it is taken as this: all but the best are as impossible, and single
precision can still divide by it."""
_PIECE = 16384
"""Elements of one pass over a row; torch shares out what is longer than 32,768."""
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Sampled:
    """`scores` where the spec asks for log probabilities."""

    token_id: int
    scores: Scores | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """The first candidates in order; `complete` when there are no others."""

    values: Tensor
    ids: Tensor
    complete: bool


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


def sample(
    logits: Tensor, specs: Sequence[SampleSpec], allowed: Mapping[int, Allowed] = NOTHING
) -> list[Sampled | None]:
    """One token per row of `logits` [rows, vocabulary] fp32; None where a row is not finite.
    `allowed`: what the grammar of a row lets come (core.engine.grammar).

    Rows whose spec has a bias, penalties or forbidden ids are changed in place.
    """
    if not specs:
        return []
    unreported = {row for row in allowed if specs[row].logprobs is None}
    for row in unreported:  # at once, so that one look at all rows finds their best
        allowed[row].hold(logits[row])
    best, best_ids = (both.tolist() for both in logits.max(-1))
    sound = [-torch.inf < value < torch.inf for value in best]  # NaN is neither
    raw = {
        row: _Raw(logits[row], best[row], spec.logprobs)
        for row, spec in enumerate(specs)
        if sound[row] and spec.logprobs is not None
    }
    for row, spec in enumerate(specs):
        held = None if row in unreported else allowed.get(row)
        if sound[row] and (held is not None or shapes(spec)):
            shape(logits[row], spec, allowed=held)
            value, index = logits[row].max(-1)
            best[row], best_ids[row] = float(value), int(index)
            sound[row] = -torch.inf < best[row] < torch.inf
    drawn = [row for row, spec in enumerate(specs) if sound[row] and not greedy(spec)]
    tokens = dict(zip(drawn, _draw_all(logits, best, drawn, specs), strict=True))
    picked: list[Sampled | None] = []
    for row in range(len(specs)):
        token = tokens.get(row, best_ids[row])
        scores = raw[row].of(token) if row in raw else None
        picked.append(Sampled(token, scores) if sound[row] else None)
    return picked


def greedy(spec: SampleSpec) -> bool:
    return spec.temperature == 0 or spec.top_p <= 0 or spec.top_k == 1


class _Raw:
    """What is reported of a row, taken before anything changes it."""

    def __init__(self, row: Tensor, best: float, count: int) -> None:
        self._row = row.clone()
        self._log_total = best + float(mass(row, best, 1.0).log())
        ids = first_ids(row, min(count, len(row)))
        self._top_ids = tuple(ids.tolist())
        self._top = tuple(self._finite(value) for value in row[ids].tolist())

    def of(self, token: int) -> Scores:
        return Scores(self._finite(float(self._row[token])), self._top_ids, self._top)

    def _finite(self, logit: float) -> float:
        return min(0.0, max(IMPOSSIBLE, logit - self._log_total))


def first_ids(row: Tensor, count: int) -> Tensor:
    """Ids of the `count` best, equals by id."""
    if not count:
        return torch.empty(0, dtype=torch.int64, device=row.device)
    ids = (row >= row.topk(count).values[-1]).nonzero().flatten()
    return ids[row[ids].sort(descending=True, stable=True).indices[:count]]


def _draw_all(
    logits: Tensor, best: Sequence[float], drawn: Sequence[int], specs: Sequence[SampleSpec]
) -> list[int]:
    """The tokens of the rows `drawn`."""
    found = []
    for row, head in zip(drawn, _heads(logits, drawn), strict=True):
        spec, line = specs[row], logits[row]
        total = partial(mass, line, best[row])
        token = draw(head, best[row], spec, total) if head is not None else None
        if token is None and len(line) > LONG_HEAD:
            token = draw(_head(*line.topk(LONG_HEAD)), best[row], spec, total)
        if token is None:
            order = line.sort(descending=True, stable=True)
            token = draw(Head(*order, complete=True), best[row], spec, total)
        assert token is not None, "the whole order holds every draw"
        found.append(token)
    return found


def _heads(logits: Tensor, drawn: Sequence[int]) -> list[Head | None]:
    """Of the rows `drawn`. Which are the largest is exact, so rows may be looked at together."""
    if not drawn or logits.shape[-1] <= HEAD:
        return [None] * len(drawn)
    values, ids = logits[list(drawn)].topk(HEAD)
    tied = (values[:, 1:] == values[:, :-1]).any(-1).tolist()
    # without ties the order stands; the last may tie with what is left out
    return [
        _head(values[at], ids[at])
        if tied[at]
        else Head(values[at, :-1], ids[at, :-1], complete=False)
        for at in range(len(drawn))
    ]


def _head(values: Tensor, ids: Tensor) -> Head:
    """The order without those that tie with its last one: equals of that are left out."""
    ids, by_id = ids[: int((values > values[-1]).sum())].sort()
    values, order = values[by_id].sort(descending=True, stable=True)
    return Head(values, ids[order], complete=False)


def draw(
    head: Head, best: float, spec: SampleSpec, all_mass: Callable[[float], Tensor]
) -> int | None:
    """The candidate at the row's uniform number; None when the head is too short to tell.
    `all_mass`: the mass of all candidates, also of those outside the head, at a temperature."""
    temperature = max(spec.temperature, COLDEST)
    # Differences to the best one are ≤ 0 before the division: a tiny temperature gives −inf and
    # a weight of 0, never inf − inf.
    weights = ((head.values.double() - best) / temperature).exp_()
    count, bounded = len(weights), head.complete
    if spec.min_p > 0:
        kept = int((weights >= spec.min_p).sum())
        bounded = bounded or kept < count
        count = kept
    if 0 < spec.top_k <= count:
        count, bounded = spec.top_k, True
    if not count or (not bounded and (spec.top_k > 0 or spec.min_p > 0)):
        return None
    sums = weights[:count].cumsum(0)
    total = sums[-1] if bounded else all_mass(temperature)
    if spec.top_p < 1:  # the nucleus: the shortest beginning whose mass reaches top_p
        size = int(torch.searchsorted(sums, spec.top_p * total)) + 1
        if size > count and not bounded:
            return None
        sums, bounded = sums[:size], True
        total = sums[-1]
    point = uniform(spec.seed, spec.choice, spec.position)
    at = int(torch.searchsorted(sums, point * total, right=True))
    if at >= len(sums):
        if not bounded:
            return None
        at = len(sums) - 1
    return int(head.ids[at])


def mass(row: Tensor, best: float, temperature: float) -> Tensor:
    """Σ exp((logit − best) / temperature) over the vocabulary, double precision."""
    total = torch.zeros((), dtype=torch.float64, device=row.device)
    for start in range(0, len(row), _PIECE):
        piece = row[start : start + _PIECE]
        total += (piece - best).div_(temperature).exp_().sum(dtype=torch.float64)
    return total
