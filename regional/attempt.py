"""One attempt of one request at one set of nodes, as a state machine without I/O.

::

    split    begin: Reserve → decode · Reserved: Prefill → prefill, Start → decode · frames … last
    direct   begin: Start with work → decode · frames … last
    pull     whoever reads: Pulling → Send → source · Sent, and on as before; Proceed → reader when
             nothing more will come. The source can neither fail nor hold up an attempt.

Messages of the nodes go in, messages to them come out. What goes wrong becomes a `Failure`; what
to do about it is decided by `after`, a pure function.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from core.errors import BY_CODE, InternalError, NoCapacity, NodeLost, RequestError
from core.types import BLOCK_TOKENS, GenerateRequest, PoolId
from regional.costs import PullPlan
from regional.pb import node_pb2 as pb
from regional.placement import Placement, expected_tokens

MAX_TRIES = 4
"""Attempts that may fail before the request does; refusals for lack of room do not count."""
MAX_MOVES = 3
"""So often an answer may be pushed out of memory and placed again; then it keeps its node, which
computes it again as often as it must."""

_encoder = msgspec.msgpack.Encoder()


class Side(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    SOURCE = "source"
    """Where the reader pulls from; it may be the decode node too."""


@dataclass(frozen=True, slots=True)
class Send:
    to: Side
    message: pb.RouterMessage


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt is over without an answer. `stage` is that of the Failed message, or lost."""

    side: Side
    stage: str
    error: RequestError
    retryable: bool


@dataclass(frozen=True, slots=True)
class Again:
    """Place the request again. `exclude` and `refuse` speak of the node on that side."""

    side: Side
    exclude: bool = False
    refuse: bool = False
    recompute: bool = False


class Attempt:
    """`accepted` once Start is out, `visible` once a delta is, `over` when nothing follows,
    `answered` when that is because the decode node ended its part: the stream, or, preempted, what
    it could do of it (`left`: where the answer stands). `move_min_tokens` and `spent` are those of
    pb.Work."""

    def __init__(
        self,
        attempt_id: str,
        placement: Placement,
        request: GenerateRequest,
        token_ids: list[int],
        *,
        move_min_tokens: int = 0,
        spent: pb.Spent | None = None,
    ) -> None:
        self.id = attempt_id
        self.placement = placement
        self.accepted = False
        self.visible = False
        self.over = False
        self.reading = True
        """The prompt's KV is still being made, here or there."""
        self.answered = False
        self.left: pb.Preempted | None = None
        self._prefill_done = placement.prefill is None
        self._asked_source = False
        self._source_over = placement.pull is None
        self._request = request
        self._token_ids = token_ids
        self._move_min_tokens = move_min_tokens
        self._spent = spent
        self._queued_s = 0.0
        self._deadline_s = request.deadline_s

    def begin(self, *, deadline_s: float, queued_s: float) -> list[Send]:
        """`deadline_s` is left of the request's time."""
        self._deadline_s, self._queued_s = deadline_s, queued_s
        if self.placement.prefill is None:
            return [self._start(self._work(deadline_s, reads=True, answers=True))]
        pool = self.placement.decode.dp_rank
        work = self._work(deadline_s, answers=True)
        reserve = pb.Reserve(attempt_id=self.id, work=work, pool=pool)
        return [Send(Side.DECODE, pb.RouterMessage(reserve=reserve))]

    def reserved(self, message: pb.Reserved, *, deadline_s: float) -> list[Send]:
        """Blocks are set aside: let the prompt be read, and decode begin when it is there."""
        if self.placement.prefill is None or self.accepted:
            return []
        prefill = pb.Prefill(
            attempt_id=self.id,
            work=self._work(deadline_s, reads=True),
            ticket=message.ticket,
            pool=self.placement.prefill.dp_rank,
        )
        return [Send(Side.PREFILL, pb.RouterMessage(prefill=prefill)), self._start(None)]

    def pulling(self, message: pb.Pulling, *, deadline_s: float) -> list[Send]:
        """The reader waits for what another node holds."""
        plan = self.placement.pull
        if plan is None or self._source_over:
            return [self._proceed()]
        if self._asked_source:
            return []
        self._asked_source = True
        send = pb.Send(
            attempt_id=self.id,
            work=self._work(deadline_s),
            ticket=message.ticket,
            pool=plan.source.dp_rank,
            tokens=_pull_tokens(plan),
        )
        return [Send(Side.SOURCE, pb.RouterMessage(send=send))]

    def sent(self, message: pb.Sent) -> list[Send]:
        """The source has done what it could."""
        if message.lacking_tokens:
            return self.source_over()
        self._source_over = True
        return []

    def source_over(self) -> list[Send]:
        """The source has gone or failed, or does not hold all: no more comes than has come."""
        if self._source_over:
            return []
        self._source_over = True
        return [self._proceed()] if self._asked_source else []

    def prefill_done(self) -> None:
        self.reading, self._prefill_done = False, True

    def output(self, message: pb.SequenceOutput) -> None:
        if message.delta:
            self.visible, self.reading = True, False
        if message.last:
            self.over = self.answered = True

    def preempted(self, message: pb.Preempted) -> None:
        self.left, self.over, self.answered = message, True, True

    def failed(self, side: Side, message: pb.Failed) -> Failure | None:
        """None when that side's part was over already."""
        if side is Side.PREFILL and not self.reading:
            return None
        self.over = True
        kind = BY_CODE.get(message.code, InternalError)
        return Failure(side, message.stage, kind(message.message), message.retryable)

    def gone(self, side: Side) -> Failure | None:
        """The session of the node on `side` has ended."""
        if self.over or (side is Side.PREFILL and not self.reading):
            return None
        self.over = True
        pool = self.pool(side)
        name = pool.node if pool else ""
        return Failure(side, "lost", NodeLost(f"{side} node {name!r} was lost"), retryable=True)

    def abort(self, reason: str) -> list[Send]:
        """To every node that may still hold something; a node takes a needless one as nothing."""
        message = pb.RouterMessage(abort=pb.Abort(attempt_id=self.id, reason=reason))
        sides = [] if self._prefill_done else [Side.PREFILL]
        if self._asked_source and not self._source_over:
            sides.append(Side.SOURCE)
        if not self.answered:
            sides.append(Side.DECODE)
        return [Send(side, message) for side in sides]

    @property
    def prompt_tokens(self) -> int:
        return len(self._token_ids)

    def pool(self, side: Side) -> PoolId | None:
        return self.placement.prefill if side is Side.PREFILL else self.placement.decode

    def _proceed(self) -> Send:
        reader = Side.DECODE if self.placement.prefill is None else Side.PREFILL
        return Send(reader, pb.RouterMessage(proceed=pb.Proceed(attempt_id=self.id)))

    def _start(self, work: pb.Work | None) -> Send:
        self.accepted = True
        pool = self.placement.decode.dp_rank
        start = pb.Start(attempt_id=self.id, work=work, queued_s=self._queued_s, pool=pool)
        return Send(Side.DECODE, pb.RouterMessage(start=start))

    def _work(self, deadline_s: float, *, reads: bool = False, answers: bool = False) -> pb.Work:
        """`reads`, `answers`: what the node that gets it does of the two, and so how much of it
        counts there."""
        sampling = self._request.sampling
        plan = self.placement.pull if reads else None
        return pb.Work(
            request=_encoder.encode(self._request),
            token_ids=self._token_ids,
            deadline_s=deadline_s,
            move_min_tokens=self._move_min_tokens,
            spent=self._spent,
            compute_tokens=self.placement.compute_tokens if reads else 0,
            answer_tokens=expected_tokens(sampling.max_tokens, sampling.n) if answers else 0,
            sequences=sampling.n if answers else 0,
            pull_tokens=0 if plan is None else _pull_tokens(plan),
            pull_s=0.0 if plan is None else plan.patience_s,
        )


def _pull_tokens(plan: PullPlan) -> int:
    """From the prompt's first token to the last that is pulled."""
    return (plan.first + plan.count) * BLOCK_TOKENS


def after(failure: Failure, *, visible: bool, tries: int) -> Again | RequestError:
    """Place again, or end the request with an error. `tries` have failed, this one included.

    Nothing that fails moves once the client has seen a delta of this attempt; what it has seen of
    earlier ones, which were preempted, is known to the token. A node without room is asked again
    when something has changed there. After a failed hand-off the decode node reads the prompt
    itself.
    """
    if visible or not failure.retryable:
        return failure.error
    if isinstance(failure.error, NoCapacity):
        return Again(failure.side, refuse=True)
    if tries >= MAX_TRIES:
        return failure.error
    if failure.stage == "transfer":
        return Again(failure.side, recompute=True)
    return Again(failure.side, exclude=True)
