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
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from core.engine import batch, sampler
from core.engine.messages import RankConfig
from core.engine.pending import Pending, accepted
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
            ops=select(
                "cpu",
                dtype,
                native=self._native,
                threads=config.threads,
                columns=(model.hidden, model.intermediate, model.heads * model.head_dim),
            ),
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
        self._kv = layers_of(self.pool, decoder.config)
        self._blocks = geometry.blocks[0]
        self._pending = Pending()

    def step(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        vocabulary = self.decoder.config.vocab_size
        whole, broken = self._pending.resolve(plan.rows)
        results = {one.sequence: one for one in broken}
        rows: list[Row] = []
        for row in whole:
            if min(row.token_ids) >= 0 and max(row.token_ids) < vocabulary:
                rows.append(row)
            else:
                results[row.sequence] = RowResult(
                    row.sequence, error=f"a token id is outside 0 … {vocabulary - 1}"
                )
        if rows:
            rows = batch.order(rows)
            for result in self._tokens(rows):
                results[result.sequence] = result
        self._pending.note(tuple(results.values()))
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
        specs = [row.specs for row in rows]
        with torch.inference_mode():
            sampled = iter(sampler.sample(logits, [one for each in specs for one in each]))
        found = []
        for row, each in zip(rows, specs, strict=True):
            # None, where the logits are not finite, is never the guess: it can only come last.
            drawn = list(islice(sampled, len(each)))
            tokens = accepted(row, [one.token_id if one else None for one in drawn]) if each else ()
            if None in tokens:
                error = "the model gave no finite logits"
                found.append(RowResult(row.sequence, error=error))
                continue
            kept = [one for one in drawn[: len(tokens)] if one is not None]
            found.append(
                RowResult(
                    row.sequence,
                    token_ids=tuple(one.token_id for one in kept),
                    scores=tuple(one.scores for one in kept if one.scores is not None),
                )
            )
        return found

    def measure(self, max_step_tokens: int) -> tuple[float, float]:
        """(prefill, decode) tokens per second, on one sequence; warms up at the same time.

        Uses blocks that nobody holds yet; what it leaves in them is never read.
        """
        limit = self._blocks * BLOCK_TOKENS
        chunk = max(1, min(128, max_step_tokens, limit - 1))
        table = tuple(range(-(-min(chunk + 1, limit) // BLOCK_TOKENS)))
        tables = (table,) * len(self.pool.groups)
        greedy = SampleSpec(temperature=0, top_p=1, top_k=0, seed=0, choice=0, position=0)
        name = SequenceId("measure")
        prompt = Row(name, (0,) * chunk, 0, tables, None)
        token = Row(name, (0,), min(chunk, limit - 1), tables, greedy)
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
    """A group of the layers that keep all tokens, and one of those that forget, if any; each has
    `blocks`, so that a window never runs short before the full layers do."""
    groups = [
        KVGroup(
            name="window" if index else "full",
            kind="window" if index else "full",
            layers=model.kv_groups.count(index),
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
            window=model.sliding_window if index else None,
        )
        for index in sorted(set(model.kv_groups))
    ]
    return KVGeometry(groups=tuple(groups), blocks=(blocks,) * len(groups))


def layers_of(pool: KVPool, model: ModelConfig) -> tuple[Tensor, ...]:
    """The KV of each layer of the model, in the order of layers."""
    groups = [iter(pool.layers(index)) for index in range(len(pool.groups))]
    return tuple(next(groups[index]) for index in model.kv_groups)


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
