"""One rank's model with its KV memory: a plan in, its result out. On the thread that computes."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor

from core.engine import batch, sampler
from core.engine.cost import SHORTEST_STEP_S
from core.engine.grammar import Filled, Masks
from core.engine.pending import Pending, accepted
from core.engine.plan import Row, RowResult, SampleSpec, SequenceId, StepPlan, StepResult
from core.engine.sampler import Sampled
from core.kv.geometry import KVGeometry, KVGroup
from core.kv.pool import BlockPool, KVPool
from core.models.config import ModelConfig
from core.models.decoder import Decoder
from core.types import BLOCK_TOKENS

_MEASURE_S = 0.2
"""Time for each of the two rates that are measured at start."""


class Stepper:
    """A whole model. Used by one thread only."""

    def __init__(
        self,
        decoder: Decoder,
        geometry: KVGeometry,
        shared: mmap.mmap,
        masks: Masks | None = None,
    ) -> None:
        self.decoder = decoder
        self.pool = KVPool(geometry, shared)
        self._kv = layers_of(self.pool, decoder.config)
        self._masks = masks
        self._pending = Pending()

    def step(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        whole, broken = self._pending.resolve(plan.rows)
        rows, refused = sound(whole, self.decoder.config.vocab_size)
        results = [*broken, *refused]
        if rows:
            rows = batch.order(rows)
            filling = self._masks.begin(rows) if self._masks is not None else None
            logits = self.logits(rows)
            filled = filling.result() if filling is not None else Filled()
            with torch.inference_mode():
                drawn = sampler.sample(logits, specs_of(rows), filled.allowed)
            results += results_of(rows, drawn, filled)
        self._pending.note(results)
        return in_order(plan, results, time.perf_counter() - began)

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """[sampled rows, vocabulary] fp32; rows as `batch.order` gives them."""
        return self.decoder.forward(batch.build(rows), self._kv)


def sound(rows: Sequence[Row], vocabulary: int) -> tuple[list[Row], list[RowResult]]:
    """The rows whose ids the model knows, and errors for the others."""
    good: list[Row] = []
    bad: list[RowResult] = []
    for row in rows:
        if min(row.token_ids) >= 0 and max(row.token_ids) < vocabulary:
            good.append(row)
        else:
            error = f"a token id is outside 0 … {vocabulary - 1}"
            bad.append(RowResult(row.sequence, error=error))
    return good, bad


def specs_of(rows: Sequence[Row]) -> list[SampleSpec]:
    return [spec for row in rows for spec in row.specs]


def results_of(
    rows: Sequence[Row], drawn: Sequence[Sampled | None], filled: Filled
) -> list[RowResult]:
    """What was drawn for `specs_of(rows)`, as far as it counts."""
    left = iter(drawn)
    found = []
    for row in rows:
        # None, where the logits are not finite, is never the guess: it can only come last.
        own = list(islice(left, len(row.specs)))
        broken = filled.broken.get(row.sequence)
        if broken is not None:
            found.append(RowResult(row.sequence, error=broken))
            continue
        tokens = accepted(row, [one.token_id if one else None for one in own]) if own else ()
        if None in tokens:
            found.append(RowResult(row.sequence, error="the model gave no finite logits"))
            continue
        kept = [one for one in own[: len(tokens)] if one is not None]
        found.append(
            RowResult(
                row.sequence,
                token_ids=tuple(one.token_id for one in kept),
                scores=tuple(one.scores for one in kept if one.scores is not None),
            )
        )
    return found


def in_order(plan: StepPlan, results: Sequence[RowResult], seconds: float) -> StepResult:
    """The result of `plan`, whose rows may have been computed in another order."""
    by_name = {one.sequence: one for one in results}
    rows = tuple(by_name[row.sequence] for row in plan.rows)
    return StepResult(number=plan.number, rows=rows, seconds=seconds)


def measure(
    step: Callable[[StepPlan], StepResult],
    geometry: KVGeometry,
    max_step_tokens: int,
    worked_s: Callable[[], float] | None = None,
) -> tuple[float, float]:
    """(prefill, decode) tokens per second, on one sequence; warms up at the same time.

    Uses blocks that nobody holds yet; what it leaves in them is never read. `worked_s`: what has
    been computed so far, in seconds of all its threads together; where it is less than what passed,
    it counts: while a whole world starts, a node waits for its cores, and who waited longest would
    seem slow until it has read thousands of tokens.
    """
    limit = geometry.blocks[0] * BLOCK_TOKENS
    chunk = max(1, min(128, max_step_tokens, limit - 1))
    table = tuple(range(-(-min(chunk + 1, limit) // BLOCK_TOKENS)))
    tables = (table,) * len(geometry.groups)
    greedy = SampleSpec(temperature=0, top_p=1, top_k=0, seed=0, choice=0, position=0)
    name = SequenceId("measure")
    prompt = Row(name, (0,) * chunk, 0, tables, None)
    token = Row(name, (0,), min(chunk, limit - 1), tables, greedy)
    step(StepPlan(0, (prompt, token)))
    worked_s = worked_s or time.perf_counter
    return chunk / _best(step, prompt, worked_s), 1 / _best(step, token, worked_s)


def _best(step: Callable[[StepPlan], StepResult], row: Row, worked_s: Callable[[], float]) -> float:
    best = float("inf")
    until = time.perf_counter() + _MEASURE_S
    for _ in range(5):
        before_s = worked_s()
        passed_s = step(StepPlan(0, (row,))).seconds
        best = min(best, passed_s, max(SHORTEST_STEP_S, worked_s() - before_s))
        if time.perf_counter() > until:
            break
    return best


def kv_geometry(
    model: ModelConfig,
    dtype: str,
    blocks: int,
    *,
    layers: range | None = None,
    heads: range | None = None,
) -> KVGeometry:
    """A group of the layers that keep all tokens, and one of those that forget, if any; each has
    `blocks`, so that a window never runs short before the full layers do. `layers`, `heads`: those
    that a rank has of the model, None: all; every rank has every group."""
    all_heads, dim = model.kv_shape
    heads = range(all_heads) if heads is None else heads
    layers = range(model.layers) if layers is None else layers
    whole = "full" if model.latent is None else "latent"
    of = model.kv_groups
    groups = [
        KVGroup(
            name="window" if index else whole,
            kind="window" if index else whole,
            layers=of[layers.start : layers.stop].count(index),
            kv_heads=len(heads),
            head_dim=dim,
            dtype=dtype,
            window=model.sliding_window if index else None,
            first_layer=of[: layers.start].count(index),
            first_head=heads.start,
        )
        for index in sorted(set(of))
    ]
    return KVGeometry(groups=tuple(groups), blocks=(blocks,) * len(groups))


def kv_heads(model: ModelConfig, own: range) -> range:
    """Whose KV a rank keeps: that of its `own` heads, but latents have none to split."""
    return own if model.latent is None else range(model.kv_shape[0])


def layers_of(
    pool: BlockPool, model: ModelConfig, layers: range | None = None
) -> tuple[Tensor, ...]:
    """The KV of each of a rank's `layers` of the model, None: all, in the order of layers."""
    groups = [iter(pool.layers(index)) for index in range(len(pool.groups))]
    layers = range(model.layers) if layers is None else layers
    return tuple(next(groups[model.kv_groups[layer]]) for layer in layers)
