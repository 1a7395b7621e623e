"""The runner of a rank on a GPU: one thread gives steps to the device, one waits for them.

The engine may have several steps under way; what it does meanwhile costs the device nothing.
Graphs are captured when nothing has been under way for a while.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Condition

import torch

from core.engine.gpu.device import Device
from core.engine.gpu.stepper import DeviceStepper, Launched
from core.engine.grammar import Masks
from core.engine.messages import RankConfig
from core.engine.plan import LoadedModel, StepPlan, StepResult, Work
from core.engine.stepper import kv_geometry, measure
from core.errors import ConfigError
from core.kv import memory
from core.kv.geometry import KVGeometry
from core.models.builder import build
from core.models.config import ModelConfig
from core.models.weights import WeightSource, fingerprint, open_weights
from kernels.ops import Ops, select

_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}

IDLE_S = 0.05
"""Without a step for so long, the device counts as idle: an engine that waits for each step before
it makes the next one leaves gaps that are none."""

Rehearse = Callable[[ModelConfig, torch.dtype, torch.device], None]


class DeviceRunner:
    """A `core.engine.plan.Runner`. `device` is made on the thread that gives steps to it;
    `rehearse` compiles while weights are read."""

    def __init__(
        self,
        config: RankConfig,
        *,
        device: Callable[[], Device],
        rehearse: Rehearse,
        ops: Callable[[torch.device, torch.dtype], Ops] = lambda where, dtype: select(
            where.type, dtype
        ),
    ) -> None:
        self._config = config
        self._make_device = device
        self._rehearse = rehearse
        self._ops = ops
        self._giving = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="landing")
        self._stepper: DeviceStepper | None = None
        self._masks: Masks | None = None
        self._descriptor: int | None = None
        self._under_way = 0
        self._counting = Condition()
        self._broken: Exception | None = None
        """What went wrong outside a step; the next one tells it."""

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        return self._giving.submit(self._load, progress).result()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        if self._stepper is None:
            raise RuntimeError("submit before load")
        handle: Future[StepResult] = Future()
        with self._counting:
            self._under_way += 1
            self._counting.notify()
        self._giving.submit(self._give, self._stepper, plan, handle)
        return handle

    def arrive(self, groups: Sequence[Sequence[int]]) -> None:
        """Blocks of each KV group have been filled in the shared memory; steps that are submitted
        from now on may read them."""
        if self._stepper is None:
            raise RuntimeError("arrive before load")
        self._giving.submit(self._beside, partial(self._stepper.arrive, groups))

    def work(self) -> Work:
        """A rank alone sends nothing."""
        return Work()

    def close(self) -> None:
        """Waits for what was given to the device, then frees the model and the KV memory."""
        self._giving.shutdown(wait=True, cancel_futures=True)
        self._waiting.shutdown(wait=True)
        self._stepper = None
        if self._masks is not None:
            self._masks.close()
            self._masks = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    # ------------------------------------------------------------------ threads

    def _give(self, stepper: DeviceStepper, plan: StepPlan, handle: Future[StepResult]) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            stepper.capture(idle=False)
            launched = stepper.launch(plan)
        except Exception as error:  # noqa: BLE001 — whoever waits for the step is told
            self._landed()
            handle.set_exception(error)
            return
        self._waiting.submit(self._land, stepper, launched, handle)

    def _land(self, stepper: DeviceStepper, launched: Launched, handle: Future[StepResult]) -> None:
        try:
            result = stepper.land(launched)
        except Exception as error:  # noqa: BLE001 — as above
            self._landed()
            handle.set_exception(error)
            return
        if self._landed():
            self._idle(stepper)
        handle.set_result(result)

    def _landed(self) -> bool:
        """Is nothing under way any more?"""
        with self._counting:
            self._under_way -= 1
            return self._under_way == 0

    def _idle(self, stepper: DeviceStepper) -> None:
        def capture() -> None:
            with self._counting:
                busy = self._counting.wait_for(lambda: self._under_way > 0, IDLE_S)
            if not busy and stepper.capture(idle=True):
                self._idle(stepper)

        try:
            self._giving.submit(self._beside, capture)
        except RuntimeError:  # closed meanwhile: there is nothing to be fast for
            return

    def _beside(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:  # noqa: BLE001 — the next step tells it
            self._broken = self._broken or error

    # ------------------------------------------------------------------ loading

    def _load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        config = self._config
        if config.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise ConfigError(f"dtype {config.dtype!r} is not supported; known: {known}")
        dtype = _DTYPES[config.dtype]
        device = self._make_device()
        progress("weights", 0.0)
        source = open_weights(Path(config.source), config.context)
        try:
            return self._read(source, device, dtype, progress)
        finally:
            source.close()

    def _read(
        self,
        source: WeightSource,
        device: Device,
        dtype: torch.dtype,
        progress: Callable[[str, float], None],
    ) -> LoadedModel:
        config, model = self._config, source.config
        name = str(dtype).removeprefix("torch.")
        geometry = kv_geometry(model, name, config.kv_blocks)
        with ThreadPoolExecutor(1, thread_name_prefix="compile") as compiling:
            compiled = compiling.submit(self._rehearse, model, dtype, device.where)
            decoder = build(
                source,
                ops=self._ops(device.where, dtype),
                progress=lambda fraction: progress("weights", fraction),
            )
            progress("weights", 1.0)
            progress("kernels", 0.0)
            compiled.result()
        progress("kernels", 1.0)
        shared = self._memory(geometry, device)
        self._masks = masks = Masks.of(Path(config.source), model.vocab_size, config.max_sequences)
        self._stepper = stepper = DeviceStepper(
            decoder,
            geometry,
            shared,
            device,
            most=config.max_sequences,
            context=model.context,
            masks=masks,
        )
        progress("measuring", 0.0)
        prefill, decode = measure(
            lambda plan: stepper.land(stepper.launch(plan)), geometry, config.max_step_tokens
        )
        progress("measuring", 1.0)
        assert self._descriptor is not None, "the memory was allocated above"
        return LoadedModel(
            fingerprint=fingerprint(source, name),
            context=model.context,
            vocab_size=model.vocab_size,
            geometry=geometry,
            memory_fd=self._descriptor,
            prefill_tokens_per_s=prefill,
            decode_tokens_per_s=decode,
        )

    def _memory(self, geometry: KVGeometry, device: Device) -> mmap.mmap:
        self._descriptor, shared = memory.allocate(geometry.pool_bytes)
        device.pin(torch.frombuffer(shared, dtype=torch.uint8))
        return shared
