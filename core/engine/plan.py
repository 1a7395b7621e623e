"""The seam between deciding and computing: one engine step as plain data, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NewType, Protocol

from core.kv.geometry import KVGeometry

SequenceId = NewType("SequenceId", str)
"""An attempt id, with ":<choice>" after it when a request has several choices."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to choose the token that follows the last computed one.

    The random number is a function of (seed, choice, position) alone, so the choice does not
    depend on batch, split or preemption. `position` counts output tokens from 0.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    choice: int
    position: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: compute `token_ids` at positions `start`, `start`+1, ….

    `block_tables`: per KV group, the pool's block ids that hold positions 0 … start+len−1.
    `sample` None: the prompt is not complete, or only its KV is wanted.
    """

    sequence: SequenceId
    token_ids: tuple[int, ...]
    start: int
    block_tables: tuple[tuple[int, ...], ...]
    sample: SampleSpec | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    number: int
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row gave: the sampled token, or an error that ends this sequence and no other."""

    sequence: SequenceId
    token_id: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    number: int
    rows: tuple[RowResult, ...]
    seconds: float


class StepHandle(Protocol):
    """A step that is being computed."""

    def result(self) -> StepResult:
        """Wait for the step. An exception means that the rank is no longer usable."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a runner knows once its weights are in place."""

    fingerprint: bytes
    context: int
    vocab_size: int
    geometry: KVGeometry
    memory_fd: int
    """Descriptor of the shared KV memory of `geometry.pool_bytes`."""
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


class Runner(Protocol):
    """Computes steps on this rank: `runner_torch.TorchRunner`, `scripted.ScriptedRunner`."""

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        """Read weights, allocate the pool, warm up and measure. `progress(stage, fraction)`."""
        ...

    def submit(self, plan: StepPlan) -> StepHandle:
        """Begin a step; steps complete in order."""
        ...

    def close(self) -> None: ...
