"""A whole model on a device that runs behind its host.

A step is given to the device without waiting for the one before: tokens that follow it are taken
from where it leaves them, and its ids come to the host when they are there. Steps that need the
host in between (grammars, penalties, log probabilities, guesses) wait for those before and use the
host's sampler. Both give the same tokens.
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

from core.engine import batch, sampler
from core.engine.gpu.device import Device, Mark
from core.engine.gpu.graphs import GraphSizes
from core.engine.gpu.inputs import GIVEN, DecodeInputs, Staging, mixed
from core.engine.gpu.pool import DevicePool, Mirror
from core.engine.gpu.sampler import UNSOUND, choose, numbers, plain, random_rows
from core.engine.grammar import Filled, Masks
from core.engine.pending import MOST_AHEAD, Pending
from core.engine.plan import Row, RowResult, SequenceId, StepPlan, StepResult
from core.engine.stepper import in_order, layers_of, results_of, sound, specs_of
from core.kv.geometry import KVGeometry
from core.kv.pool import KVPool
from core.models.decoder import Decoder

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


class DeviceStepper:
    """`launch`, `arrive` and `capture` belong to one thread, `land` to any. `most`: sequences that
    are sampled in one step."""

    def __init__(
        self,
        decoder: Decoder,
        geometry: KVGeometry,
        shared: mmap.mmap,
        device: Device,
        *,
        most: int,
        context: int,
        masks: Masks | None = None,
    ) -> None:
        where, vocabulary = device.where, decoder.config.vocab_size
        self.decoder = decoder
        self.pool = DevicePool(geometry, where)
        self._device = device
        self._most = most
        self._masks = masks
        self._mirror = Mirror(self.pool, KVPool(geometry, shared), device)
        self._kv = layers_of(self.pool, decoder.config)
        self._staging = Staging(device)
        self._drawn = torch.zeros(MOST_AHEAD * most, dtype=torch.int64, device=where)
        self._inputs = DecodeInputs(geometry, most, context, self._drawn, self._staging)
        self._logits = torch.empty((most, vocabulary), dtype=torch.float32, device=where)
        self._heard = [device.pinned(most, torch.int64) for _ in range(MOST_AHEAD + 1)]
        self._sizes = GraphSizes(most)
        self._graphs: dict[int, Callable[[], None]] = {}
        self._steps = 0
        self._places: deque[dict[SequenceId, int]] = deque(maxlen=MOST_AHEAD)
        self._pending = Pending()
        self._flying: deque[Launched] = deque()
        self._landing = Lock()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Give a step to the device, behind those before."""
        began = self._device.mark()
        rows, errors = sound(plan.rows, self.decoder.config.vocab_size)
        self._steps += 1
        if all(not row.drafts and plain(spec) for row in rows for spec in row.specs):
            return self._ahead(plan, rows, errors, began)
        return self._together(plan, rows, errors, began)

    def land(self, launched: Launched) -> StepResult:
        """Wait for a step, and for those before it. An exception: the device is unusable."""
        with self._landing:
            self._land_until(launched)
        assert launched.result is not None, "it was among those that were launched"
        return launched.result

    def arrive(self, groups: Sequence[Sequence[int]]) -> None:
        """Blocks of each KV group were filled in the shared memory: for steps from now on."""
        self._mirror.into(groups)

    @torch.inference_mode()
    def capture(self, *, idle: bool) -> bool:
        """Capture a graph if one is wanted. `idle`: nothing is to be computed just now."""
        size = self._sizes.next(idle=idle)
        if size is None:
            return False
        self._inputs.fill((), (), size)
        try:
            self._graphs[size] = self._device.capture(lambda: self._decode(size))
        except RuntimeError as error:
            _log.warning("decode steps of %d rows go without a graph: %s", size, error)
            self._sizes.failed(size)
        else:
            self._sizes.captured(size)
        return True

    # ------------------------------------------------------------------ a step

    def _ahead(
        self, plan: StepPlan, rows: Sequence[Row], errors: list[RowResult], began: Mark
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
        place = self._place(sampled)
        ids = self._heard[self._steps % len(self._heard)][: len(sampled)]
        if given:
            logits = self._forward(given, sources)
            if sampled:
                self._choose(sampled, logits, place, ids)
        computed = self._device.mark()
        copied = self._mirror.out(given)
        launched = Launched(plan, given, errors, ids, began, computed, copied)
        self._flying.append(launched)
        return launched

    def _together(
        self, plan: StepPlan, rows: Sequence[Row], errors: list[RowResult], began: Mark
    ) -> Launched:
        """With the host's sampler, when all steps before have landed."""
        with self._landing:
            self._land_until(None)
        whole, broken = self._pending.resolve(rows)
        results = [*errors, *broken]
        if whole:
            whole = batch.order(whole)
            filling = self._masks.begin(whole) if self._masks is not None else None
            logits = self._forward(whole, [GIVEN] * len(whole)).cpu()
            copied = self._mirror.out(whole)
            filled = filling.result() if filling is not None else Filled()
            drawn = sampler.sample(logits, specs_of(whole), filled.allowed)
            results += results_of(whole, drawn, filled)
            if copied is not None:
                copied.wait()
        ended = [one for one in results if one.token_ids]
        place = self._place(ended)
        if ended:
            ids = torch.tensor([one.token_ids[-1] for one in ended])
            self._staging.send(ids, self._drawn[place : place + len(ended)])
        computed = self._device.mark()
        computed.wait()
        self._pending.note(results)
        result = in_order(plan, results, computed.since(began))
        return Launched(plan, whole, [], self._heard[0][:0], began, computed, None, result)

    def _forward(self, rows: Sequence[Row], sources: Sequence[int]) -> Tensor:
        """Logits of what is sampled, in the order of `rows`."""
        if all(len(row.token_ids) == 1 and row.sample is not None for row in rows):
            size = self._sizes.use(len(rows))
            self._inputs.fill(rows, sources, size or len(rows))
            if size is None:
                self._decode(len(rows))
            else:
                self._graphs[size]()
            return self._logits[: len(rows)]
        given = mixed(rows, sources, self._drawn, self._staging)
        return self.decoder.forward(given, self._kv)

    def _decode(self, size: int) -> None:
        """What a graph keeps."""
        logits = self.decoder.forward(self._inputs.batch(size), self._kv)
        self._logits[:size].copy_(logits)

    def _choose(self, rows: Sequence[Row], logits: Tensor, place: int, ids: Tensor) -> None:
        """Sampled ids on their way to the host; steps that follow find them on the device."""
        specs, send = specs_of(rows), self._staging.send
        chosen = choose(logits, send(numbers(specs)), send(random_rows(specs)))
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
        seconds = launched.computed.since(launched.began)
        return in_order(launched.plan, results, seconds)
