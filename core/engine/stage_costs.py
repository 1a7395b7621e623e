"""Which layers each pipeline stage gets, by what layers, embedding and head cost here."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from core.engine import batch, sampler
from core.engine.plan import Row, SampleSpec, SequenceId
from core.engine.stepper import kv_geometry, kv_heads, layers_of
from core.kv.geometry import KVGeometry
from core.kv.pool import BlockPool, KVPool
from core.models.builder import read_embedding, read_head, read_layer, read_norm, read_shape
from core.models.config import ModelConfig
from core.models.decoder import ForwardBatch
from core.models.parallel import Shard, balanced, layer_weights, shard
from core.models.reader import Reader
from core.models.shard import ShardedSource
from core.models.weights import WeightSource
from core.parallel import Plan
from kernels.experts import Experts
from kernels.layers import ExpertsMlp, Layer
from kernels.ops import Ops

_TOKENS = 8
"""Decoded together: between one, where weights are all that counts, and many."""
_MEASURE_S = 0.4
"""Time for all measurements together."""
_HEAD_ROWS = 32768
"""Of the vocabulary, measured in place of all: the first stage keeps no head and should read none
of a large one."""
_TURN_S = 0.0005
"""For the first stage, beside what it computes: from the result of a step of `_TOKENS` to
the next one of its sequences (two messages, the scheduler's turn, a plan), when all others have
their steps and it has none. As measured on one machine: at load there is nothing to measure it by.
"""
_TRUST = 2.0
"""What is measured counts as far as it is within so many times what the weights say: beyond that
it says more about who else is at work on this machine."""
_GREEDY = SampleSpec(temperature=0, top_p=1, top_k=0, seed=0, choice=0, position=0)

Work = Callable[[], object]


class Bench(Protocol):
    """Where `ops` compute, as a measurement needs it."""

    def pool(self, geometry: KVGeometry) -> BlockPool: ...

    def placed(self, tokens: ForwardBatch) -> ForwardBatch:
        """The tensors of a step, there."""
        ...

    def seconds(self, work: Work) -> float:
        """What it takes, once."""
        ...


class HostBench:
    """The host."""

    def pool(self, geometry: KVGeometry) -> BlockPool:
        return KVPool(geometry, mmap.mmap(-1, geometry.pool_bytes))

    def placed(self, tokens: ForwardBatch) -> ForwardBatch:
        return tokens

    def seconds(self, work: Work) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began


_HOST = HostBench()


def measured_stages(
    plan: Plan, source: WeightSource, ops: Ops, bench: Bench = _HOST
) -> list[range]:
    """Balanced by the times of one layer of each kind, with the heads and columns of one rank."""
    layers, before, after = measured_costs(plan, source, ops, bench)
    after = trusted(source.config, layers, after)
    turn = min(_TURN_S, sum(layers) / plan.pp / 4)  # of so small a model it would be everything
    return balanced(layers, plan.pp, before=before + turn, after=after)


def trusted(model: ModelConfig, layers: Sequence[float], after: float) -> float:
    """The cost of norm and head beside that of all layers, as far as it is to be believed."""
    weights = model.hidden * model.vocab_size / sum(layer_weights(model)) * sum(layers)
    return min(max(after, weights / _TRUST), weights * _TRUST)


@torch.inference_mode()
def measured_costs(
    plan: Plan, source: WeightSource, ops: Ops, bench: Bench = _HOST
) -> tuple[list[float], float, float]:
    """Seconds of each layer, of the embedding, and of norm, head and a greedy draw."""
    model = source.config
    own = shard(plan, 0, model)
    ids = own.vocabulary
    own = replace(own, vocabulary=ids[:_HEAD_ROWS])
    reader = Reader(ShardedSource(source, own), ops)
    groups = len(set(model.kv_groups))
    tokens = bench.placed(
        batch.build(
            [Row(SequenceId(str(n)), (0,), 0, ((n,),) * groups, None) for n in range(_TOKENS)]
        )
    )
    embedding, _ = read_embedding(reader)
    states = embedding(tokens.tokens)
    norm, head = read_norm(reader), read_head(reader)

    def predict() -> object:
        logits = head(ops.rms_norm(states, norm, model.norm_eps)).float()
        return sampler.sample(logits, [_GREEDY] * _TOKENS)

    kinds = [_kind(model, index) for index in range(model.layers)]
    firsts = {kind: kinds.index(kind) for kind in kinds}
    layers = [_layer(plan, reader, own, index, states, tokens, bench) for index in firsts.values()]
    seconds = _seconds(bench, [*layers, lambda: embedding(tokens.tokens), predict])
    costs = dict(zip(firsts, seconds, strict=False))
    after = seconds[-1] * len(ids) / len(own.vocabulary)
    return [costs[kind] for kind in kinds], seconds[-2], after


def _layer(
    plan: Plan,
    reader: Reader,
    own: Shard,
    index: int,
    states: Tensor,
    tokens: ForwardBatch,
    bench: Bench,
) -> Work:
    """A call of one layer."""
    model, ops = reader.source.config, reader.ops
    only = range(index, index + 1)
    dtype = str(ops.dtype).removeprefix("torch.")
    heads = kv_heads(model, own.kv_heads)
    geometry = kv_geometry(model, dtype, _TOKENS, layers=only, heads=heads)
    kv = layers_of(bench.pool(geometry), model, only)
    layer = _alone(read_layer(reader, index, own.experts if plan.ep > 1 else None))
    run = ops.layers([layer], read_shape(reader))
    return lambda: run(states.clone(), tokens.positions, tokens.groups, kv)


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


def _seconds(bench: Bench, works: Sequence[Work]) -> list[float]:
    """The best of each, taken in turns: whatever disturbs them disturbs all."""
    best = [float("inf")] * len(works)
    for work in works:
        work()
    until = time.perf_counter() + _MEASURE_S
    while True:
        for n, work in enumerate(works):
            best[n] = min(best[n], bench.seconds(work))
        if time.perf_counter() > until:
            return best
