"""What a request changes about a row of logits before anything is drawn from it.

What its grammar forbids, forbidden ids (end tokens before `min_tokens`), then bias, then the
repetition penalty over prompt and output, then frequency and presence over the output alone: the
order and the formulas are those of vLLM's documented sampler. The counts are made from the
sequence's ids each time: nothing is kept between steps, so nothing can go stale when a sequence is
preempted, aborted or guessed ahead for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.engine.allowed import Allowed
from core.engine.plan import SampleSpec

_LARGEST = float(torch.finfo(torch.float32).max)


def shapes(spec: SampleSpec) -> bool:
    """Does `shape` change anything?"""
    return bool(spec.bias) or _forbids(spec) or _penalises(spec)


def shape(row: Tensor, spec: SampleSpec, first: int = 0, allowed: Allowed | None = None) -> None:
    """Change `row`, fp32, in place: the logits of the ids from `first` on. Ids outside it are left
    out. `allowed`: what the row's grammar lets come."""
    ids = range(first, first + len(row))
    if allowed is not None:
        allowed.hold(row, first)
    if _forbids(spec):
        row[_places(spec.forbidden, ids, row)] = -torch.inf
    if spec.bias:
        given = [(token, value) for token, value in spec.bias if token in ids]
        values = torch.tensor([value for _, value in given], dtype=row.dtype, device=row.device)
        row.index_add_(0, _places([token for token, _ in given], ids, row), values)
    if _penalises(spec):
        assert spec.history is not None, "penalties come with a history"
        # a copy, for torch wants memory that may be written
        tokens = torch.frombuffer(bytearray(spec.history.tokens), dtype=torch.int32)
        tokens = tokens.to(row.device, torch.int64)
        _repetition(row, _inside(tokens, ids), spec.repetition_penalty)
        _output(row, _inside(tokens[spec.history.prompt :], ids), spec)


def _forbids(spec: SampleSpec) -> bool:
    return bool(spec.forbidden) and spec.position < spec.min_tokens


def _penalises(spec: SampleSpec) -> bool:
    return (
        spec.repetition_penalty != 1
        or spec.presence_penalty != 0
        or spec.frequency_penalty != 0
    )  # fmt: skip


def _repetition(row: Tensor, tokens: Tensor, penalty: float) -> None:
    if penalty == 1:
        return
    ids = tokens.bincount().nonzero().flatten()
    values = row[ids]
    # a penalty near 0 must not make a large logit infinite
    row[ids] = torch.where(values > 0, (values / penalty).clamp(max=_LARGEST), values * penalty)


def _output(row: Tensor, tokens: Tensor, spec: SampleSpec) -> None:
    if not len(tokens) or not (spec.presence_penalty or spec.frequency_penalty):
        return
    counts = tokens.bincount()
    ids = counts.nonzero().flatten()
    row[ids] -= counts[ids].to(row.dtype) * spec.frequency_penalty
    row[ids] -= spec.presence_penalty


def _inside(tokens: Tensor, ids: range) -> Tensor:
    """Places in the row of those that are in it."""
    return tokens[(tokens >= ids.start) & (tokens < ids.stop)] - ids.start


def _places(tokens: list[int] | tuple[int, ...], ids: range, row: Tensor) -> Tensor:
    inside = [token - ids.start for token in tokens if token in ids]
    return torch.tensor(inside, dtype=torch.int64, device=row.device)
