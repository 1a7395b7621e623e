"""A model, or a rank's part of one, on a device that runs behind its host.

A step is given to the device without waiting for the one before: tokens that follow it are taken
from where it leaves them, and its ids come to the host when they are there. Steps that need the
host in between (grammars, penalties, log probabilities, guesses) wait for those before and use the
host's sampler. Both give the same tokens.

Of a plan's ranks each has a stepper, and all are given the same in the same order.
"""

from __future__ import annotations

import logging
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from core.engine import batch
from core.engine.gpu.chooser import Chooser
from core.engine.gpu.device import Device, Mark
from core.engine.gpu.inputs import GIVEN, DecodeInputs, Staging, mixed
from core.engine.gpu.pool import DevicePool, Mirror
from core.engine.gpu.sampler import UNSOUND
from core.engine.grammar import Filled, Masks
from core.engine.pending import MOST_AHEAD, Pending
from core.engine.plan import Row, RowResult, SequenceId, StepPlan, StepResult
from core.engine.process_groups import Groups
from core.engine.shard_stepper import least_bytes
from core.engine.stepper import in_order, layers_of, results_of, sound
from core.kv.geometry import KVGeometry
from core.kv.pool import KVPool
from core.models.stage import Stage
from kernels.draw import Draw, draw_by_sorting

_log = logging.getLogger("skerry.engine")
_LOST = "the step before gave no token"


@dataclass(slots=True)
class Launched:
    """A step that the device has been given. `ids`: of its sampled rows, on the host once it has
    `computed`; `copied`: blocks for others; `errors`: of rows that were not given."""

    plan: StepPlan
    rows: Sequence[Row]
    errors: list[RowResult]
    ids: Tensor
    began: Mark
    computed: Mark
    copied: Mark | None
    result: StepResult | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """`sent`: bytes that a replay sends to other ranks."""

    replay: Callable[[], None]
    sent: int


class DeviceStepper:
    """`launch`, `arrive` and `capture` belong to one thread, `land` to any. `most`: sequences that
    are sampled in one step. `busy_s`: how long the device has computed steps that have landed."""

    def __init__(
        self,
        stage: Stage,
        geometry: KVGeometry,
        shared: mmap.mmap,
        device: Device,
        *,
        most: int,
        context: int,
        groups: Groups | None = None,
        masks: Masks | None = None,
        draw: Draw = draw_by_sorting,
    ) -> None:
        where, shard = device.where, stage.shard
        self.stage = stage
        self.pool = DevicePool(geometry, where)
        self.busy_s = 0.0
        self._device = device
        self._groups = groups = groups if groups is not None else Groups()
        self._most = most
        self._masks = masks
        self._mirror = Mirror(self.pool, KVPool(geometry, shared), device)
        self._kv = layers_of(self.pool, stage.config, shard.layers)
        self._staging = Staging(device)
        self._drawn = torch.zeros(MOST_AHEAD * most, dtype=torch.int64, device=where)
        self._inputs = DecodeInputs(geometry, most, context, self._drawn, self._staging)
        self._hidden = None if shard.embeds else stage.empty(most).zero_()
        self._out = stage.empty(most)
        if shard.predicts:
            logits = (most, len(shard.vocabulary))
            self._out = torch.empty(logits, dtype=torch.float32, device=where)
        self._chooser = Chooser(stage.config.vocab_size, groups, self._staging, draw)
        self._heard = [device.pinned(most, torch.int64) for _ in range(MOST_AHEAD + 1)]
        self._graphs: dict[int, Graph] = {}
        self._least = 0
        self._steps = 0
        self._places: deque[dict[SequenceId, int]] = deque(maxlen=MOST_AHEAD)
        self._pending = Pending()
        self._flying: deque[Launched] = deque()
        self._landing = Lock()

    @property
    def sent_bytes(self) -> int:
        return self._groups.traffic.sent

    @property
    def least_bytes(self) -> int:
        """What this rank would have had to send at the least."""
        return self._least + self._groups.traffic.rows

    @property
    def captures(self) -> bool:
        """Can a decode step be kept as a graph? Not where tokens travel to experts: how many, the
        host must know."""
        return self._groups.experts.size == 1

    @torch.inference_mode()
    def launch(self, plan: StepPlan, graph: int = 0) -> Launched:
        """Give a step to the device, behind those before. `graph`: the size of one that has been
        captured and holds all of its rows, which decode; 0: none. Raises NodeLost."""
        began = self._device.mark()
        rows, errors = sound(plan.rows, self.stage.config.vocab_size)
        self._steps += 1
        if self.stage.shard.predicts and any(map(self._chooser.needs_host, rows)):
            return self._together(plan, rows, errors, began, graph)
        return self._ahead(plan, rows, errors, began, graph)

    def land(self, launched: Launched) -> StepResult:
        """Wait for a step, and for those before it. An exception: the device is unusable. A rank
        that does not predict knows no tokens."""
        with self._landing:
            self._land_until(launched)
        assert launched.result is not None, "it was among those that were launched"
        return launched.result

    def arrive(self, groups: Sequence[Sequence[int]]) -> None:
        """Blocks of each KV group were filled in the shared memory: for steps from now on."""
        self._mirror.into(groups)

    @torch.inference_mode()
    def capture(self, size: int) -> bool:
        """Capture the graph of decode steps of `size` rows; False: it cannot be."""
        self._inputs.fill((), (), size)
        traffic = self._groups.traffic
        before = after = traffic.sent
        alone = self._groups.tensor.size == 1
        try:
            if alone:
                self._decode(size)  # what is compiled or chosen at first use, is before
        except RuntimeError as error:
            return self._no_graph(size, error)
        if not alone:  # the others are in the same sums: what fails here, fails for all
            self._decode(size)
        after = traffic.sent
        try:
            replay = self._device.capture(lambda: self._decode(size))
        except RuntimeError as error:
            return self._no_graph(size, error)
        finally:
            traffic.sent = after
        self._graphs[size] = Graph(replay, after - before)
        return True

    def _no_graph(self, size: int, error: RuntimeError) -> bool:
        _log.warning("decode steps of %d rows go without a graph: %s", size, error)
        return False

    # ------------------------------------------------------------------ a step

    def _ahead(
        self,
        plan: StepPlan,
        rows: Sequence[Row],
        errors: list[RowResult],
        began: Mark,
        graph: int,
    ) -> Launched:
        """Without waiting for anything."""
        given, sources = [], []
        for row in batch.order(rows):
            source = self._source(row)
            if source is None:
                errors.append(RowResult(row.sequence, error=_LOST))
            else:
                given.append(row)
                sources.append(source)
        sampled = [row for row in given if row.sample is not None]
        sampled = sampled if self.stage.shard.predicts else []
        place = self._place(sampled)
        ids = self._heard[self._steps % len(self._heard)][: len(sampled)]
        if given:
            logits, waited = self._forward(given, sources, graph)
            began = waited or began
            if sampled and logits is not None:
                self._choose(sampled, logits, place, ids)
        else:
            self.stage.idle()
        computed = self._device.mark()
        copied = self._mirror.out(given)
        launched = Launched(plan, given, errors, ids, began, computed, copied)
        self._flying.append(launched)
        return launched

    def _together(
        self,
        plan: StepPlan,
        rows: Sequence[Row],
        errors: list[RowResult],
        began: Mark,
        graph: int,
    ) -> Launched:
        """With the host's sampler, when all steps before have landed."""
        with self._landing:
            self._land_until(None)
        whole, broken = self._pending.resolve(rows)
        results = [*errors, *broken]
        if whole:
            whole = batch.order(whole)
            filling = self._masks.begin(whole) if self._masks is not None else None
            logits, waited = self._forward(whole, [GIVEN] * len(whole), graph)
            began = waited or began
            assert logits is not None, "only ranks that predict choose"
            copied = self._mirror.out(whole)
            filled = filling.result() if filling is not None else Filled()
            drawn = self._chooser.together(whole, logits, filled)
            results += results_of(whole, drawn, filled)
            if copied is not None:
                copied.wait()
        else:
            self.stage.idle()
        ended = [one for one in results if one.token_ids]
        place = self._place(ended)
        if ended:
            ids = torch.tensor([one.token_ids[-1] for one in ended])
            self._staging.send(ids, self._drawn[place : place + len(ended)])
        computed = self._device.mark()
        computed.wait()
        self._pending.note(results)
        seconds = computed.since(began)
        self.busy_s += seconds
        result = in_order(plan, results, seconds)
        return Launched(plan, whole, [], self._heard[0][:0], began, computed, None, result)

    def _forward(
        self, rows: Sequence[Row], sources: Sequence[int], graph: int
    ) -> tuple[Tensor | None, Mark | None]:
        """Logits of what is sampled, in the order of `rows`; None: hidden states have gone on to
        the next stage. And since when the device computes, where it waited for a stage before."""
        steady = all(len(row.token_ids) == 1 and row.sample is not None for row in rows)
        tokens = sum(len(row.token_ids) for row in rows)
        sampled = sum(len(row.specs) for row in rows)
        self._least += least_bytes(self.stage, self._groups.tensor.size, tokens, sampled)
        if steady:
            size = graph or len(rows)
            self._inputs.fill(rows, sources, size)
            began = self._receive(None if self._hidden is None else self._hidden[: len(rows)])
            if graph:
                kept = self._graphs[graph]
                kept.replay()
                self._groups.traffic.sent += kept.sent
            else:
                self._decode(size)
            out = self._out[: len(rows)]
        else:
            given = mixed(rows, sources, self._drawn, self._staging)
            hidden = None if self._hidden is None else self.stage.empty(tokens)
            began = self._receive(hidden)
            out = self.stage.forward(given, self._kv, hidden)
        line = self._groups.line
        if line is None or self.stage.shard.predicts:
            return out, began
        line.send(out.clone() if steady else out, line.rank + 1)
        return None, began

    def _receive(self, hidden: Tensor | None) -> Mark | None:
        """What the stage before gives; when it was there."""
        line = self._groups.line
        if hidden is None or line is None:
            return None
        line.receive(hidden, line.rank - 1)
        return self._device.mark()

    def _decode(self, size: int) -> None:
        """What a graph keeps."""
        hidden = None if self._hidden is None else self._hidden[:size]
        out = self.stage.forward(self._inputs.batch(size), self._kv, hidden)
        self._out[:size].copy_(out)

    def _choose(self, rows: Sequence[Row], logits: Tensor, place: int, ids: Tensor) -> None:
        """Sampled ids on their way to the host; steps that follow find them on the device."""
        chosen = self._chooser.ahead(rows, logits)
        self._drawn[place : place + len(rows)].copy_(chosen)
        ids.copy_(chosen, non_blocking=True)

    def _place(self, named: Sequence[Row | RowResult]) -> int:
        """Where this step's tokens go, in this order. Those of the `MOST_AHEAD` − 1 steps before
        stay, so each step must have its place."""
        place = self._steps % MOST_AHEAD * self._most
        self._places.appendleft({one.sequence: place + at for at, one in enumerate(named)})
        return place

    def _source(self, row: Row) -> int | None:
        """Where a row's first token lies; None: nowhere."""
        if not row.follows:
            return GIVEN
        held = (step[row.sequence] for step in self._places if row.sequence in step)
        return next(held, None)

    def _land_until(self, wanted: Launched | None) -> None:
        """In their order; None: all."""
        while self._flying and (wanted is None or wanted.result is None):
            self._flying[0].result = self._landed(self._flying[0])
            self._flying.popleft()

    def _landed(self, launched: Launched) -> StepResult:
        launched.computed.wait()
        if launched.copied is not None:
            launched.copied.wait()
        seconds = launched.computed.since(launched.began)
        self.busy_s += seconds
        if not self.stage.shard.predicts:
            return StepResult(launched.plan.number, (), seconds)
        ids = iter(launched.ids.tolist())
        results = list(launched.errors)
        for row in launched.rows:
            token = next(ids) if row.sample is not None else None
            if row.follows and self._pending.newest(row.sequence) is None:
                results.append(RowResult(row.sequence, error=_LOST))
            elif token == UNSOUND:
                error = "the model gave no finite logits"
                results.append(RowResult(row.sequence, error=error))
            else:
                token_ids = () if token is None else (token,)
                results.append(RowResult(row.sequence, token_ids=token_ids))
        self._pending.note(results)
        return in_order(launched.plan, results, seconds)
