"""Which layers each pipeline stage gets, by what layers, embedding and head cost here."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from core.engine import batch
from core.engine.plan import Row, SequenceId
from core.engine.stepper import kv_geometry, kv_heads, layers_of
from core.kv.pool import KVPool
from core.models.builder import read_embedding, read_head, read_layer, read_norm, read_shape
from core.models.config import ModelConfig
from core.models.parallel import balanced, shard
from core.models.reader import Reader
from core.models.shard import ShardedSource
from core.models.weights import WeightSource
from core.parallel import Plan
from kernels.experts import Experts
from kernels.layers import ExpertsMlp, Layer
from kernels.ops import Ops

_TOKENS = 8
"""Decoded together: between one, where weights are all that counts, and many."""
_RUNS = 5
_MEASURE_S = 0.05
"""Time for each thing that is measured, when it is slow."""


def measured_stages(plan: Plan, source: WeightSource, ops: Ops) -> list[range]:
    """Balanced by the times of one layer of each kind, with the heads and columns of one rank."""
    costs, before, after = measured_costs(plan, source, ops)
    return balanced(costs, plan.pp, before=before, after=after)


@torch.inference_mode()
def measured_costs(plan: Plan, source: WeightSource, ops: Ops) -> tuple[list[float], float, float]:
    """Seconds of each layer, of the embedding, and of norm and head."""
    model = source.config
    own = shard(plan, 0, model)
    reader = Reader(ShardedSource(source, own), ops)
    groups = len(set(model.kv_groups))
    tokens = batch.build(
        [Row(SequenceId(str(n)), (0,), 0, ((n,),) * groups, None) for n in range(_TOKENS)]
    )
    embedding, _ = read_embedding(reader)
    states = embedding(tokens.tokens)
    before = _seconds(lambda: embedding(tokens.tokens))
    norm, head = read_norm(reader), read_head(reader)
    after = _seconds(lambda: head(ops.rms_norm(states, norm, model.norm_eps)))
    dtype = str(ops.dtype).removeprefix("torch.")
    shape = read_shape(reader)
    found: dict[tuple[object, ...], float] = {}
    costs = []
    for index in range(model.layers):
        kind = _kind(model, index)
        if kind not in found:
            only = range(index, index + 1)
            geometry = kv_geometry(
                model, dtype, _TOKENS, layers=only, heads=kv_heads(model, own.kv_heads)
            )
            pool = KVPool(geometry, mmap.mmap(-1, geometry.pool_bytes))
            kv = layers_of(pool, model, only)
            experts = own.experts if plan.ep > 1 else None
            run = ops.layers([_alone(read_layer(reader, index, experts))], shape)
            found[kind] = _seconds(
                lambda: run(states.clone(), tokens.positions, tokens.groups, kv)  # noqa: B023 — called before the next turn
            )
        costs.append(found[kind])
    return costs, before, after


class _Folded:
    """Experts of one rank, standing in for all of them."""

    def __init__(self, local: Experts) -> None:
        self.count = local.count
        self._local = local

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self._local(x, ids % self.count, weights)


def _alone(layer: Layer) -> Layer:
    mlp = layer.mlp
    if not isinstance(mlp, ExpertsMlp):
        return layer
    return replace(layer, mlp=replace(mlp, experts=_Folded(mlp.experts)))


def _kind(model: ModelConfig, index: int) -> tuple[object, ...]:
    return model.moe is not None and index in model.moe.layers, model.window(index)


def _seconds(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    until = time.perf_counter() + _MEASURE_S
    for _ in range(_RUNS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
        if time.perf_counter() > until:
            break
    return best
