"""The runner with a model: steps on one thread of their own, in the order of submission.

The rank's thread stays free for its socket while a step computes; torch leaves the interpreter
lock during operations. Memory that is shared with the node front is allocated here.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from core.engine import batch, sampler
from core.engine.messages import RankConfig
from core.engine.plan import (
    LoadedModel,
    Row,
    RowResult,
    SampleSpec,
    SequenceId,
    StepPlan,
    StepResult,
)
from core.errors import ConfigError
from core.kv import memory
from core.kv.geometry import KVGeometry, KVGroup
from core.kv.pool import KVPool
from core.models.config import ModelConfig
from core.models.decoder import Decoder
from core.models.llama import build
from core.models.weights import fingerprint, open_weights
from core.types import BLOCK_TOKENS
from kernels.ops import select

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
_MEASURE_S = 0.2
"""Time for each of the two rates that are measured at start."""


class TorchRunner:
    """A `core.engine.plan.Runner`. `native` False: only PyTorch references."""

    def __init__(self, config: RankConfig, *, native: bool = True) -> None:
        self._config = config
        self._native = native
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._stepper: Stepper | None = None
        self._descriptor: int | None = None

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        return self._worker.submit(self._load, progress).result()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        if self._stepper is None:
            raise RuntimeError("submit before load")
        return self._worker.submit(self._stepper.step, plan)

    def close(self) -> None:
        """Waits for the step that is being computed, then frees the model and the KV memory."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._stepper = None
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
        source = open_weights(Path(config.source))
        model = source.config
        context = config.context or model.context
        if context > model.context:
            raise ConfigError(
                f"context {context} is above the model's own limit of {model.context} tokens"
            )
        name = str(dtype).removeprefix("torch.")
        decoder = build(
            source,
            dtype=dtype,
            ops=select("cpu", native=self._native, threads=config.threads),
            progress=lambda fraction: progress("weights", fraction),
        )
        identity = fingerprint(source, name)
        source.close()
        geometry = kv_geometry(model, name, config.kv_blocks)
        self._descriptor, shared = memory.allocate(geometry.pool_bytes)
        _use_large_pages(shared)
        self._stepper = stepper = Stepper(decoder, geometry, shared)
        progress("measuring", 0.0)
        prefill, decode = stepper.measure(config.max_step_tokens)
        progress("measuring", 1.0)
        return LoadedModel(
            fingerprint=identity,
            context=context,
            vocab_size=model.vocab_size,
            geometry=geometry,
            memory_fd=self._descriptor,
            prefill_tokens_per_s=prefill,
            decode_tokens_per_s=decode,
        )


class Stepper:
    """A model with its KV memory, computing one plan at a time. Used by one thread only."""

    def __init__(self, decoder: Decoder, geometry: KVGeometry, shared: mmap.mmap) -> None:
        self.decoder = decoder
        self.pool = KVPool(geometry, shared)
        self._kv: tuple[Tensor, ...] = self.pool.layers(0)
        self._blocks = geometry.blocks[0]

    def step(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        vocabulary = self.decoder.config.vocab_size
        results: dict[SequenceId, RowResult] = {}
        rows: list[Row] = []
        for row in plan.rows:
            if min(row.token_ids) >= 0 and max(row.token_ids) < vocabulary:
                rows.append(row)
            else:
                results[row.sequence] = RowResult(
                    row.sequence, error=f"a token id is outside 0 … {vocabulary - 1}"
                )
        if rows:
            rows = batch.order(rows)
            for row, token in zip(rows, self._tokens(rows), strict=True):
                results[row.sequence] = token
        return StepResult(
            number=plan.number,
            rows=tuple(results[row.sequence] for row in plan.rows),
            seconds=time.perf_counter() - began,
        )

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """[sampled rows, vocabulary] fp32; rows as `batch.order` gives them."""
        return self.decoder.forward(batch.build(rows), self._kv)

    def _tokens(self, rows: Sequence[Row]) -> list[RowResult]:
        logits = self.logits(rows)
        specs = [row.sample for row in rows if row.sample is not None]
        with torch.inference_mode():
            tokens = iter(sampler.sample(logits, specs))
        found = []
        for row in rows:
            token = next(tokens) if row.sample is not None else None
            broken = row.sample is not None and token is None
            error = "the model gave no finite logits" if broken else None
            found.append(RowResult(row.sequence, token_id=token, error=error))
        return found

    def measure(self, max_step_tokens: int) -> tuple[float, float]:
        """(prefill, decode) tokens per second, on one sequence; warms up at the same time.

        Uses blocks that nobody holds yet; what it leaves in them is never read.
        """
        limit = self._blocks * BLOCK_TOKENS
        chunk = max(1, min(128, max_step_tokens, limit - 1))
        table = tuple(range(-(-min(chunk + 1, limit) // BLOCK_TOKENS)))
        greedy = SampleSpec(temperature=0, top_p=1, top_k=0, seed=0, choice=0, position=0)
        name = SequenceId("measure")
        prompt = Row(name, (0,) * chunk, 0, (table,), None)
        token = Row(name, (0,), min(chunk, limit - 1), (table,), greedy)
        self.step(StepPlan(0, (prompt, token)))
        return chunk / self._best(prompt), 1 / self._best(token)

    def _best(self, row: Row) -> float:
        best = float("inf")
        until = time.perf_counter() + _MEASURE_S
        for _ in range(5):
            best = min(best, self.step(StepPlan(0, (row,))).seconds)
            if time.perf_counter() > until:
                break
        return best


def kv_geometry(model: ModelConfig, dtype: str, blocks: int) -> KVGeometry:
    group = KVGroup(
        name="full",
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )
    return KVGeometry(groups=(group,), blocks=(blocks,))


def _use_large_pages(shared: mmap.mmap) -> None:
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
