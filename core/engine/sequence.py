"""One sequence in a rank: its tokens, how far it is computed, which blocks it holds.

::

    WAITING ──admitted──▶ RUNNING ──last token──▶ FINISHED
       ▲                   │   └─(prefill only) n−1 computed──▶ HELD ──Release──▶ FINISHED
       └────preempted──────┘  └─given back─▶ FINISHED, or HELD until its blocks are copied
    RESERVED ──Begin──▶ WAITING, with its blocks in hand

Abort and errors lead from every state to FINISHED.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from core.engine.messages import SequenceSpec
from core.engine.plan import History, SampleSpec, SequenceId
from core.engine.speculate import Speculation
from core.kv.block_manager import BlockTable
from core.kv.prefix_cache import TokenChain
from core.types import FinishReason


class Status(Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    """Blocks are set aside and being filled by a peer."""
    RUNNING = "running"
    HELD = "held"
    """Computed no more, and its blocks are read: a finished prefill, or one that is given back."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` = prompt + output. `planned` ≥ `computed`: positions given to the runner, positions
    whose KV is in place. `seen`: positions that were once in place, so that what is computed again
    after a preemption is not counted again. `limit`: tokens of prompt and output at which it ends
    for its length."""

    id: SequenceId
    spec: SequenceSpec
    arrival: int
    prefill_only: bool
    tokens: list[int]
    chain: TokenChain
    table: BlockTable
    limit: int
    deadline: float | None = None
    """On the scheduler's clock."""
    speculation: Speculation | None = None
    status: Status = Status.WAITING
    computed: int = 0
    planned: int = 0
    seen: int = 0
    in_flight: int = 0
    """Steps that hold a row of this sequence and have no result yet."""
    pending: int = 0
    """Of these, the ones that sample: so many tokens are not known yet."""
    computed_prompt: int = 0
    """Prompt tokens that this rank computed for it."""
    reported: bool = False
    """The first output has gone out."""
    key: tuple[int, int] = field(init=False)
    """Order of service: priority, then arrival."""
    needs_history: bool = field(init=False)
    """What is sampled depends on what was generated, beyond the model itself."""
    _penalised: bool = field(init=False)
    _ids: array[int] = field(init=False)
    """`tokens` as penalties and grammars want them, kept up only when there are any."""

    def __post_init__(self) -> None:
        self.key = (self.spec.priority, self.arrival)
        spec = self.spec
        penalties = (spec.repetition_penalty, spec.presence_penalty, spec.frequency_penalty)
        self._penalised = penalties != (1, 0, 0)
        self.needs_history = bool(spec.grammar) or self._penalised
        self._ids = array("i")

    @property
    def goal(self) -> int:
        """Positions to compute, as far as is known: up to the newest token, or to the one that a
        step in flight samples. The last token of an answer is never computed. Penalties and
        grammars want all tokens but the newest."""
        if self.prefill_only:
            return len(self.tokens) - 1
        ahead = self.pending
        if ahead > 1 and self.needs_history:
            ahead = 1
        known = len(self.tokens) + ahead
        return known if known < self.limit else self.limit - 1

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
        """How to choose the next token that no step in flight chooses."""
        spec = self.spec
        return SampleSpec(
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            seed=spec.seed,
            choice=spec.choice,
            position=self.outputs + self.pending,
            min_p=spec.min_p,
            repetition_penalty=spec.repetition_penalty,
            presence_penalty=spec.presence_penalty,
            frequency_penalty=spec.frequency_penalty,
            bias=spec.logit_bias,
            forbidden=tuple(sorted(spec.stop_ids)) if spec.min_tokens else (),
            min_tokens=spec.min_tokens,
            history=self._history(),
            logprobs=spec.logprobs,
            grammar=spec.grammar,
        )

    def _history(self) -> History | None:
        if not self.needs_history:
            return None
        self._ids.extend(self.tokens[len(self._ids) :])
        prompt = len(self.spec.token_ids)
        if not self._penalised:  # a grammar looks at the answer alone
            return History(self._ids[prompt:].tobytes(), 0)
        return History(self._ids.tobytes(), prompt)

    def append(self, token_ids: tuple[int, ...]) -> int:
        """Add tokens up to the one that ends the sequence: how many."""
        for gained, token in enumerate(token_ids, start=1):
            self.tokens.append(token)
            if self.finish() is not None:
                return gained
        return len(token_ids)

    def finish(self) -> FinishReason | None:
        """Why no further token may be generated, if so."""
        if self.outputs and self.tokens[-1] in self.spec.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None
