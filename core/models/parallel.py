"""What each rank of a plan keeps of a model: layers, heads, columns, vocabulary rows, experts.

Pure: ranges of the whole model's numbers. What is split is kept exactly once among the ranks of a
TP group; KV heads are copied when there are more ranks than heads (`core.parallel.kv_slice`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import ConfigError
from core.models.config import ModelConfig
from core.models.numbers import numbers_of
from core.parallel import Place, Plan, kv_slice, refusal

UNIT = 32
"""Columns and vocabulary rows are cut at multiples of this where there are enough of them: blocks
of quantised weights are that wide, and so are the words of a token mask."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part, as ranges over the whole model.

    `embeds`, `predicts`: it has (its rows of) the embedding, of norm and head. `columns` are those
    of the MLP, `shared` those of the shared experts. `experts` are kept whole when ep > 1;
    otherwise every rank has `expert_columns` of all of them.
    """

    place: Place
    layers: range
    embeds: bool
    predicts: bool
    heads: range
    kv_heads: range
    columns: range
    vocabulary: range
    experts: range = range(0)
    expert_columns: range = range(0)
    shared: range = range(0)


def split(total: int, parts: int, unit: int = UNIT) -> tuple[range, ...]:
    """`total` things for `parts` ranks in a row, as even as whole units allow; the last unit may be
    smaller. Single things are the units where there are fewer units than ranks."""
    units = -(-total // unit)
    if units < parts:
        units, unit = total, 1
    edges = [min(total, units * part // parts * unit) for part in range(parts + 1)]
    return tuple(range(first, last) for first, last in itertools.pairwise(edges))


def balanced(costs: Sequence[float], parts: int, *, before: float, after: float) -> list[range]:
    """Runs of consecutive layers, the dearest as cheap as can be. `before` is the cost of what
    comes ahead of the first layer, `after` of what follows the last. Every run has a layer."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    layers = len(costs)

    def run(first: int, last: int) -> float:
        """The cost of a stage of layers [first, last)."""
        own = sums[last] - sums[first]
        return own + (before if first == 0 else 0.0) + (after if last == layers else 0.0)

    # best[last] for so many parts: the dearest of them, and where the last one begins
    best: list[tuple[float, int]] = [(run(0, last), 0) for last in range(layers + 1)]
    begins: list[list[int]] = [[0] * (layers + 1)]
    for part in range(2, parts + 1):
        following: list[tuple[float, int]] = [(float("inf"), 0)] * (layers + 1)
        for last in range(part, layers + 1):
            following[last] = min(
                (max(best[first][0], run(first, last)), first) for first in range(part - 1, last)
            )
        best = following
        begins.append([first for _, first in following])
    runs: list[range] = []
    last = layers
    for part in range(parts - 1, -1, -1):
        first = begins[part][last]
        runs.insert(0, range(first, last))
        last = first
    return runs


def shard(
    plan: Plan, rank: int, model: ModelConfig, layers: Sequence[range] | None = None
) -> Shard:
    """What `rank` keeps of `model`. `layers`: those of each stage; None: by `estimated_stages`.

    Raises ConfigError, with the numbers, when the model does not divide.
    """
    check(plan, model)
    place = plan.place(rank)
    runs = layers if layers is not None else estimated_stages(plan, model)
    first_kv, kv_count = kv_slice(numbers_of(model), plan, place.tp_rank)
    heads = model.heads // plan.tp
    moe = model.moe
    tp_rank = place.tp_rank
    experts = columns = shared = range(0)
    if moe is not None:
        own = rank % plan.stage_ranks % plan.ep
        experts = split(moe.count, plan.ep, 1)[own]
        columns = range(moe.width) if plan.ep > 1 else split(moe.width, plan.tp)[tp_rank]
        shared = split(moe.shared_width, plan.tp)[tp_rank]
    return Shard(
        place=place,
        layers=runs[place.stage],
        embeds=place.stage == 0,
        predicts=place.stage == plan.pp - 1,
        heads=range(tp_rank * heads, (tp_rank + 1) * heads),
        kv_heads=range(first_kv, first_kv + kv_count),
        columns=split(model.intermediate, plan.tp)[tp_rank],
        vocabulary=split(model.vocab_size, plan.tp)[tp_rank],
        experts=experts,
        expert_columns=columns,
        shared=shared,
    )


def check(plan: Plan, model: ModelConfig) -> None:
    """Raises ConfigError, with the numbers, when the model does not divide as the plan says."""
    why = refusal(plan, numbers_of(model))
    if why is None and model.moe is not None and plan.ep == 1 and model.moe.width < plan.tp:
        why = f"tp {plan.tp} is more than the {model.moe.width} columns of an expert"
    if why is not None:
        raise ConfigError(why)


def estimated_stages(plan: Plan, model: ModelConfig) -> list[range]:
    """Balanced by the weights that a token meets."""
    return balanced(
        layer_weights(model), plan.pp, before=0.0, after=float(model.hidden * model.vocab_size)
    )


def layer_weights(model: ModelConfig) -> list[float]:
    """How many weights one token meets in each layer."""
    hidden, moe, latent = model.hidden, model.moe, model.latent
    if latent is None:
        attention = hidden * model.head_dim * 2 * (model.heads + model.kv_heads)
    else:
        query = latent.query_rank or hidden
        attention = (
            hidden * (latent.query_rank + latent.rank + latent.rope)
            + query * model.heads * model.head_dim
            + model.heads * latent.rank * (latent.nope + latent.value)
            + model.heads * latent.value * hidden
        )
    dense = 3 * hidden * model.intermediate
    mixed = 0
    if moe is not None:
        mixed = 3 * hidden * (moe.chosen * moe.width + moe.shared_width) + hidden * moe.count
    mixtures = frozenset(moe.layers if moe is not None else ())
    return [
        float(attention + (mixed if index in mixtures else dense)) for index in range(model.layers)
    ]
