"""The seam between deciding and computing: one engine step as plain data, and its result."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NewType, Protocol, runtime_checkable

import msgspec

from core.kv.geometry import KVGeometry

SequenceId = NewType("SequenceId", str)
"""An attempt id, with ":<choice>" after it when a request has several choices."""


@dataclass(frozen=True, slots=True)
class History:
    """A sequence's ids for penalties and grammars: `tokens` are prompt and output, int32 in native
    order, the first `prompt` of them the prompt. Bytes, so that a step copies and never converts
    them."""

    tokens: bytes
    prompt: int

    def plus(self, token_ids: Sequence[int]) -> History:
        return History(self.tokens + array("i", token_ids).tobytes(), self.prompt)


class Scores(msgspec.Struct, frozen=True, array_like=True):
    """Of one sampled token: its log probability, and the best candidates in falling order.

    The model's own distribution, before bias, penalties, temperature and filters; what is
    impossible has `IMPOSSIBLE`, so every number is finite.
    """

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


IMPOSSIBLE = -9999.0
"""The log probability of a token that cannot come, as OpenAI writes it."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to choose the token that follows the last computed one.

    The random number is a function of (seed, choice, position) alone, so the choice does not
    depend on batch, split or preemption. `position` counts output tokens from 0. The penalties
    are computed from `history` each time, so no runner keeps a count that could go stale.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    choice: int
    position: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    forbidden: tuple[int, ...] = ()
    """End tokens: not to be chosen while `position` is below `min_tokens`."""
    min_tokens: int = 0
    history: History | None = None
    """Given whenever a penalty or a grammar is set: the sequence up to the token that is to be
    chosen, without the placeholder of a row that `follows`."""
    logprobs: int | None = None
    """Report the token's log probability, with so many of the best."""
    grammar: str = ""
    """Only tokens that it allows after the output so far may be chosen; "" allows all."""

    def after(self, token_ids: Sequence[int]) -> SampleSpec:
        """The same, once `token_ids` have been added to the output."""
        if not token_ids:
            return self
        return replace(self.knowing(token_ids), position=self.position + len(token_ids))

    def knowing(self, token_ids: Sequence[int]) -> SampleSpec:
        """The same position, whose history lacked `token_ids`."""
        if self.history is None:
            return self
        return replace(self, history=self.history.plus(token_ids))


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: compute `token_ids` at positions `start`, `start`+1, ….

    `block_tables`: per KV group, the pool's block ids that hold positions 0 … start+len−1; what a
    group's window has passed is 0 there and is not read.
    `sample` None: the prompt is not complete, or only its KV is wanted. Otherwise it says how to
    choose the token after the last given one; `drafts` further positions follow, see `specs`.
    `drafts`: so many of `token_ids`, at the end, are guesses. One more token than that is drawn,
    after the last given token and after each guess; they count up to the first that is not the
    guess made for it (`core.engine.pending.accepted`).
    `follows`: `token_ids[0]` is a placeholder for the token that the newest step with a row of this
    sequence samples; it has no drafts then (`core.engine.pending.Pending` fills it in).
    """

    sequence: SequenceId
    token_ids: tuple[int, ...]
    start: int
    block_tables: tuple[tuple[int, ...], ...]
    sample: SampleSpec | None
    drafts: int = 0
    follows: bool = False

    @property
    def decodes(self) -> bool:
        """It continues an answer: one token, and guesses."""
        return self.sample is not None and len(self.token_ids) == 1 + self.drafts

    @property
    def specs(self) -> tuple[SampleSpec, ...]:
        """How to sample after each of the last `drafts`+1 tokens; none without `sample`."""
        if self.sample is None:
            return ()
        guesses = self.token_ids[len(self.token_ids) - self.drafts :]
        return tuple(self.sample.after(guesses[:n]) for n in range(self.drafts + 1))


@dataclass(frozen=True, slots=True)
class StepPlan:
    number: int
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a row gave: the sampled tokens (one, and one more for each draft that was right), or an
    error that ends this sequence and no other."""

    sequence: SequenceId
    token_ids: tuple[int, ...] = ()
    error: str | None = None
    scores: tuple[Scores, ...] = ()
    """One for each of `token_ids`, where the row's SampleSpec asks for them."""


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

    def add_done_callback(self, done: Callable[[Any], object], /) -> None:
        """Have `done` called with the handle, from any thread, once `result` does not wait."""
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


@dataclass(frozen=True, slots=True)
class Work:
    """What the ranks of a pool have done together since they serve. `least_bytes`: what they would
    have had to send each other at the least. `stage_seconds`: how long each stage has computed;
    `bubble`: the share of the stages' time in which they stood still while a step was under way."""

    sent_bytes: int = 0
    least_bytes: int = 0
    stage_seconds: tuple[float, ...] = ()
    bubble: float = 0.0


class Runner(Protocol):
    """Computes steps on this rank: `runner_torch.TorchRunner`, `scripted.ScriptedRunner`."""

    def load(self, progress: Callable[[str, float], None]) -> LoadedModel:
        """Read weights, allocate the pool, warm up and measure. `progress(stage, fraction)`."""
        ...

    def submit(self, plan: StepPlan) -> StepHandle:
        """Begin a step; steps complete in order."""
        ...

    def work(self) -> Work:
        """So far. Raises NodeLost when a rank that computes with this one has gone."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Mirrors(Protocol):
    """A runner whose KV lies elsewhere and has its double in the shared memory."""

    def arrive(self, groups: Sequence[Sequence[int]]) -> None:
        """Blocks of each KV group were filled in the shared memory: steps that are submitted from
        now on may read them."""
        ...
