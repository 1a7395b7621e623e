"""The runner with a model: steps on one thread of their own, in the order of submission.

The rank's thread stays free for its socket while a step computes; torch leaves the interpreter
lock during operations. Memory that is shared with the node front is allocated here.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from core.engine.grammar import Masks
from core.engine.messages import RankConfig
from core.engine.plan import LoadedModel, StepPlan, StepResult, Work
from core.engine.stepper import Stepper, kv_geometry, measure
from core.errors import ConfigError
from core.kv import memory
from core.models.builder import build
from core.models.weights import fingerprint, open_weights
from kernels.ops import select

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


class TorchRunner:
    """A `core.engine.plan.Runner`. `native` False: only PyTorch references."""

    def __init__(self, config: RankConfig, *, native: bool = True) -> None:
        self._config = config
        self._native = native
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._stepper: Stepper | None = None
        self._masks: Masks | None = None
        self._descriptor: int | None = None

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        return self._worker.submit(self._load, progress).result()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        if self._stepper is None:
            raise RuntimeError("submit before load")
        return self._worker.submit(self._stepper.step, plan)

    def work(self) -> Work:
        """A rank alone sends nothing."""
        return Work()

    def close(self) -> None:
        """Waits for the step that is being computed, then frees the model and the KV memory."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._stepper = None
        if self._masks is not None:
            self._masks.close()
            self._masks = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        config = self._config
        if config.device not in ("auto", "cpu"):
            raise ConfigError(f"device {config.device!r} is not supported; known: auto, cpu")
        torch.set_num_threads(config.threads)
        dtype = compute_dtype(config.dtype)
        progress("weights", 0.0)
        source = open_weights(Path(config.source), config.context)
        model = source.config
        name = str(dtype).removeprefix("torch.")
        decoder = build(
            source,
            ops=select(
                "cpu",
                dtype,
                native=self._native,
                threads=config.threads,
                columns=model.columns,
            ),
            progress=lambda fraction: progress("weights", fraction),
        )
        identity = fingerprint(source, name)
        source.close()
        geometry = kv_geometry(model, name, config.kv_blocks)
        self._descriptor, shared = memory.allocate(geometry.pool_bytes)
        use_large_pages(shared)
        self._masks = masks = Masks.of(Path(config.source), model.vocab_size, config.max_sequences)
        self._stepper = stepper = Stepper(decoder, geometry, shared, masks)
        progress("measuring", 0.0)
        prefill, decode = measure(
            stepper.step,
            geometry,
            config.max_step_tokens,
            lambda: time.process_time() / config.threads,
        )
        progress("measuring", 1.0)
        return LoadedModel(
            fingerprint=identity,
            context=model.context,
            vocab_size=model.vocab_size,
            geometry=geometry,
            memory_fd=self._descriptor,
            prefill_tokens_per_s=prefill,
            decode_tokens_per_s=decode,
        )


def use_large_pages(shared: mmap.mmap) -> None:
    """A layer of a block is a few KB: with small pages each costs a walk of the page table."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them; nothing else changes
            shared.madvise(mmap.MADV_HUGEPAGE)


def compute_dtype(name: str) -> torch.dtype:
    """`auto` is decided by what the processor has instructions for, not by a measurement: nodes
    that hand KV to each other must come to the same answer."""
    if name == "auto":
        return torch.bfloat16 if _has_bf16() else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; known: auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _has_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    except OSError:  # not Linux: no claim about its instructions
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)
