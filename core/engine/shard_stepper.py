"""What one rank of a plan does of a step: its layers, with its heads, for all rows.

All ranks get the same plan and come to the same decisions about it. Hidden states arrive from the
stage before and go on to the next; on the last stage all ranks of a TP group draw together.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from core.engine import batch, sampler, sampler_split
from core.engine.grammar import Filled, Filling, Masks
from core.engine.pending import Pending
from core.engine.plan import Row, RowResult, StepPlan, StepResult
from core.engine.process_groups import Groups
from core.engine.sampler import Sampled
from core.engine.sampler_split import Vocabulary
from core.engine.stepper import in_order, layers_of, results_of, sound, specs_of
from core.kv.geometry import KVGeometry
from core.kv.pool import KVPool
from core.models.decoder import ForwardBatch
from core.models.parallel import split
from core.models.stage import Stage
from core.parallel import Plan

CANDIDATE_BYTES = 8
"""The least that a rank has to say of a row: a value and an id."""


class ShardStepper:
    """Used by one thread only. `busy_s`: how long it has computed, without waiting for the stage
    before; `least_bytes`: what this rank would have had to send at the least."""

    def __init__(
        self,
        stage: Stage,
        plan: Plan,
        geometry: KVGeometry,
        shared: mmap.mmap,
        groups: Groups,
        masks: Masks | None = None,
    ) -> None:
        self.stage = stage
        self.pool = KVPool(geometry, shared)
        self.busy_s = 0.0
        self._plan = plan
        self._groups = groups
        self._masks = masks
        self._kv = layers_of(self.pool, stage.config, stage.shard.layers)
        self._pending = Pending()
        self._least = 0
        self._waited_s = 0.0
        vocabulary = split(stage.config.vocab_size, plan.tp)
        self._vocabulary = Vocabulary(vocabulary, groups.tensor)

    @property
    def least_bytes(self) -> int:
        return self._least + self._groups.traffic.rows

    @property
    def sent_bytes(self) -> int:
        return self._groups.traffic.sent

    def step(self, plan: StepPlan) -> StepResult | None:
        """The result, on ranks of the last stage. A plan without rows is for those who share
        experts with another pool that has some. Raises NodeLost when a peer has gone."""
        began, idle_before = time.perf_counter(), self._waited_s
        whole, broken = self._pending.resolve(plan.rows)
        rows, refused = sound(whole, self.stage.config.vocab_size)
        results = [*broken, *refused]
        with torch.inference_mode():
            if rows:
                rows = batch.order(rows)
                filling = self._filling(rows)
                logits = self.forward(batch.build(rows))
                if logits is not None:
                    filled = filling.result() if filling is not None else Filled()
                    results += self._drawn(rows, logits, filled)
            else:
                self.stage.idle()
        taken = time.perf_counter() - began
        self.busy_s += taken - (self._waited_s - idle_before)
        if not self.stage.shard.predicts:
            return None
        self._pending.note(results)
        return in_order(plan, results, taken)

    def forward(self, tokens: ForwardBatch) -> Tensor | None:
        """Logits [sampled, own ids] on the last stage; the others send hidden states on."""
        self._least += least_bytes(
            self.stage, self._plan.tp, len(tokens.tokens), len(tokens.sampled)
        )
        line = self._groups.line
        hidden = None
        if line is not None and not self.stage.shard.embeds:
            began = time.perf_counter()
            hidden = line.receive(self.stage.empty(len(tokens.tokens)), line.rank - 1)
            self._waited_s += time.perf_counter() - began
        out = self.stage.forward(tokens, self._kv, hidden)
        if line is None or self.stage.shard.predicts:
            return out
        line.send(out, line.rank + 1)
        return None

    def _filling(self, rows: Sequence[Row]) -> Filling | None:
        if self._masks is None or not self.stage.shard.predicts:
            return None
        return self._masks.begin(rows)

    def _drawn(self, rows: Sequence[Row], logits: Tensor, filled: Filled) -> list[RowResult]:
        specs = specs_of(rows)
        drawn: list[Sampled | None]
        if self._groups.tensor.size == 1:
            drawn = sampler.sample(logits, specs, filled.allowed)
        else:
            drawn = sampler_split.sample(logits, specs, self._vocabulary, filled.allowed)
        return results_of(rows, drawn, filled)


def least_bytes(stage: Stage, ranks: int, tokens: int, sampled: int) -> int:
    """What one of `ranks` of a TP group would have to send at the least: two sums a layer, one for
    the embedding, one message to the next stage, and a candidate for each token that is drawn."""
    shard = stage.shard
    states = tokens * stage.empty(1).nbytes
    sums = 2 * len(shard.layers) + shard.embeds
    least = sums * 2 * (ranks - 1) * states // ranks
    return least + (ranks - 1) * CANDIDATE_BYTES * sampled if shard.predicts else least + states
