"""One sequence in a rank: its tokens, how far it is computed, which blocks it holds.

::

    WAITING ──admitted──▶ RUNNING ──last token──▶ FINISHED
       ▲                   │   └─(prefill only) n−1 computed──▶ HELD ──Release──▶ FINISHED
       └────preempted──────┘
    RESERVED ──Begin──▶ WAITING, with its blocks in hand

Abort and errors lead from every state to FINISHED.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from core.engine.messages import SequenceSpec
from core.engine.plan import SampleSpec, SequenceId
from core.errors import ContextLengthExceeded, InvalidRequest, NoCapacity, RequestError
from core.kv.block_manager import BlockTable
from core.kv.prefix_cache import TokenChain
from core.types import FinishReason


class Status(Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    """Blocks are set aside and being filled by a peer."""
    RUNNING = "running"
    HELD = "held"
    """A finished prefill whose blocks are being sent."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` = prompt + output. `planned` ≥ `computed`: positions given to the runner, positions
    whose KV is in place. `seen`: positions that were once in place, so that what is computed again
    after a preemption is not counted again."""

    id: SequenceId
    spec: SequenceSpec
    arrival: int
    prefill_only: bool
    tokens: list[int]
    chain: TokenChain
    table: BlockTable
    status: Status = Status.WAITING
    computed: int = 0
    planned: int = 0
    seen: int = 0
    in_flight: int = 0
    """Steps that hold a row of this sequence and have no result yet."""
    computed_prompt: int = 0
    """Prompt tokens that this rank computed for it."""
    reported: bool = False
    """The first output has gone out."""
    key: tuple[int, int] = field(init=False)
    """Order of service: priority, then arrival."""

    def __post_init__(self) -> None:
        self.key = (self.spec.priority, self.arrival)

    @property
    def goal(self) -> int:
        """Positions to compute before there is nothing to do until a token is sampled."""
        return len(self.tokens) - 1 if self.prefill_only else len(self.tokens)

    @property
    def remaining(self) -> int:
        return self.goal - self.planned

    @property
    def outputs(self) -> int:
        """Tokens generated so far, those of an earlier life included."""
        return len(self.tokens) - len(self.spec.token_ids)

    @property
    def preemptible(self) -> bool:
        """May lose its blocks: nobody outside the rank and no step in flight knows them."""
        return (
            self.status in (Status.RUNNING, Status.WAITING)
            and not self.prefill_only
            and not self.in_flight
            and len(self.table) > 0
        )

    @property
    def backlog(self) -> int:
        """Prompt tokens still to be computed here."""
        if self.status not in (Status.RUNNING, Status.WAITING):
            return 0
        return max(0, min(self.goal, len(self.spec.token_ids)) - self.computed)

    def sample(self) -> SampleSpec:
        spec = self.spec
        return SampleSpec(
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            seed=spec.seed,
            choice=spec.choice,
            position=self.outputs,
        )

    def finish(self, context: int) -> FinishReason | None:
        """Why no further token may be generated, if so."""
        if self.outputs and self.tokens[-1] in self.spec.stop_ids:
            return FinishReason.STOP
        if self.outputs >= self.spec.max_tokens or len(self.tokens) >= context:
            return FinishReason.LENGTH
        return None


def refusal(
    spec: SequenceSpec, *, context: int, pool_tokens: int, vocab_size: int
) -> RequestError | None:
    """Why this rank can never serve `spec`, if so. `context` is the model's, `pool_tokens` what
    the KV pool holds."""
    if not spec.token_ids:
        return InvalidRequest("the prompt has no tokens", param="prompt")
    for ids, param in ((spec.token_ids, "prompt"), (spec.output_ids, "resume")):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = next(one for one in ids if not 0 <= one < vocab_size)
            return InvalidRequest(
                f"token id {wrong} is outside the vocabulary of {vocab_size}", param=param
            )
    if spec.max_tokens < 1:
        return InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if not (math.isfinite(spec.temperature) and spec.temperature >= 0):
        return InvalidRequest("temperature must be a number from 0 up", param="temperature")
    if not 0 <= spec.top_p <= 1:
        return InvalidRequest("top_p must lie between 0 and 1", param="top_p")
    if spec.top_k < 0:
        return InvalidRequest("top_k must be 0 or more", param="top_k")
    prompt = len(spec.token_ids)
    if prompt >= context:
        return ContextLengthExceeded(
            f"the prompt has {prompt} tokens; with at least one token of answer that is over the "
            f"context of {context}",
            param="prompt",
        )
    if prompt >= pool_tokens:
        return NoCapacity(
            f"the prompt has {prompt} tokens and this node's KV cache holds {pool_tokens}"
        )
    return None
