"""Which experts of a mixture compute a token, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """`chosen` experts a token. `sigmoid`: scores are sigmoids of the logits, else their softmax.
    `normalised`: the weights of a token are divided by their sum; then all are times `scale`.

    With `groups` > 1 the experts form that many equal runs, of which the `kept_groups` with the
    highest sum of their two best scores are considered (DeepSeek-V3, 2024, §2.1.2).
    """

    chosen: int
    sigmoid: bool = False
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1


def route(logits: Tensor, correction: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """(expert ids [tokens, chosen] int64, weights [tokens, chosen] fp32) of logits
    [tokens, experts] fp32. `correction` [experts] is added for the choice and not to the weights.
    """
    scores = logits.sigmoid() if routing.sigmoid else logits.softmax(-1)
    wanted = scores if correction is None else scores + correction
    if routing.groups > 1:
        wanted = _kept(wanted, routing)
    ids = wanted.topk(routing.chosen, -1).indices
    weights = scores.gather(-1, ids)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * routing.scale


def _kept(wanted: Tensor, routing: Routing) -> Tensor:
    """`wanted` with −∞ for the experts of groups that are not considered."""
    grouped = wanted.view(len(wanted), routing.groups, wanted.shape[1] // routing.groups)
    best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(-1, best.topk(routing.kept_groups, -1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).view(wanted.shape)
