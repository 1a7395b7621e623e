"""The node's control: what routers ask and what the rank reports meet here.

Every attempt that decodes here is one entry of `_answers`, bound to the session that it came
through, and leaves by `_free`; prefills for other nodes are `Errands`. All methods run on the event
loop and do not wait.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial

from core.engine import messages as rank_messages
from core.engine.messages import EngineStats, RankMessage, SequenceSpec, TokenOutput
from core.engine.plan import SequenceId
from core.errors import (
    BY_CODE,
    DeadlineExceeded,
    Draining,
    InternalError,
    RequestError,
    TransferFailed,
)
from regional.node import wire
from regional.node.answer import Answer, Text
from regional.node.answering import Answering
from regional.node.errands import Errands
from regional.node.pool import Pool, total
from regional.node.prefill import Outbox, PrefillJob
from regional.node.receiving import Reservation
from regional.node.resolve import sequence_specs
from regional.pb import node_pb2 as pb

log = logging.getLogger("skerry.node")


class Front:
    """See the module."""

    def __init__(
        self,
        *,
        context: int,
        vocab_size: int,
        text: Text,
        pools: Sequence[Pool],
        clock: Callable[[], float],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.draining = False
        self.kv_bytes_received = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._context = context
        self._vocab_size = vocab_size
        self._text = text
        self._pools = tuple(pools)
        self._errands = Errands(tasks, self._note_idle)
        self._sessions: list[Outbox] = []
        self._answers: dict[str, Answering] = {}
        self._choices: dict[SequenceId, tuple[Answering, int]] = {}
        self._generations = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._clock = clock

    @property
    def stats(self) -> EngineStats:
        """Of all pools together."""
        return total([pool.stats for pool in self._pools])

    @property
    def kv_bytes_sent(self) -> int:
        return self._errands.sent_bytes

    # ------------------------------------------------------------ sessions

    def session_opened(self, outbox: Outbox) -> None:
        """A router has been joined: tell it what the cache holds, and from now on what changes."""
        self._sessions.append(outbox)
        for pool in self._pools:
            for message in pool.cache.snapshot():
                outbox.send(message)

    def session_closed(self, outbox: Outbox) -> None:
        """Abort every attempt that came through this session."""
        self._sessions.remove(outbox)
        for attempt in [one for one in self._answers.values() if one.outbox is outbox]:
            self._free(attempt)
        self._errands.session_closed(outbox)

    def handle(self, message: pb.RouterMessage, outbox: Outbox) -> None:
        """One message of a router, after its Welcome."""
        match message.WhichOneof("body"):
            case "reserve":
                self._reserve(message.reserve, outbox)
            case "prefill":
                self._prefill(message.prefill, outbox)
            case "start":
                self._start(message.start, outbox)
            case "abort":
                self._abort(message.abort.attempt_id)
            case "drain":
                self.drain(message.drain.grace_s)
            case other:
                log.warning("a message of kind %s is not known here", other)

    def drain(self, grace_s: float) -> None:
        """Take no new work; what still runs after `grace_s` fails as retryable."""
        if not self.draining:
            self.draining = True
            log.info("draining: %d answers, %d prefills", len(self._answers), len(self._errands))
        self._loop.call_later(grace_s, self.fail_all, Draining("the node stops"))

    def fail_all(self, error: RequestError) -> None:
        """End everything that is under way with `error`."""
        for attempt in list(self._answers.values()):
            self._fail(attempt, error)
        self._errands.fail_all(error)

    # ------------------------------------------------------------ decode side

    def _reserve(self, message: pb.Reserve, outbox: Outbox) -> None:
        attempt = self._admit(
            message.attempt_id, message.work, outbox, message.pool, stage="reserve"
        )
        if attempt is not None:
            sequence = SequenceId(attempt.id)
            attempt.pool.rank.send(rank_messages.Reserve(sequence, attempt.specs[0]))

    def _start(self, message: pb.Start, outbox: Outbox) -> None:
        if message.HasField("work"):
            attempt = self._admit(
                message.attempt_id, message.work, outbox, message.pool, stage="decode"
            )
            if attempt is not None:
                attempt.answer.queued_s = message.queued_s
                attempt.start_wanted = True
                self._run(attempt)
            return
        reserved = self._answers.get(message.attempt_id)
        if reserved is None:
            error = TransferFailed("the reservation is gone")
            outbox.send(wire.failed(message.attempt_id, "transfer", error))
            return
        reserved.answer.queued_s = message.queued_s
        reserved.start_wanted = True
        self._advance(reserved)

    def _run(self, attempt: Answering) -> None:
        """Read the prompt here and answer, unless the answer it is to go on with was whole."""
        whole = attempt.answer.whole(now=self._clock())
        if whole is None:
            attempt.pool.rank.send(rank_messages.Run(SequenceId(attempt.id), attempt.specs[0]))
            return
        self._free(attempt)
        said = pb.SequenceOutput(
            attempt_id=attempt.id, frames=whole.frames, delta=whole.delta, last=whole.last
        )
        attempt.outbox.send(pb.NodeMessage(step_output=pb.StepOutput(sequences=[said])))

    def _admit(
        self, attempt_id: str, message: pb.Work, outbox: Outbox, pool: int, *, stage: str
    ) -> Answering | None:
        """Take an attempt in, or refuse it with a Failed."""
        if attempt_id in self._answers:
            log.warning("attempt %s was sent twice; the second is ignored", attempt_id)
            return None
        try:
            work, specs = self._resolve(message)
            found = self._pool(pool)
        except RequestError as error:
            outbox.send(wire.failed(attempt_id, stage, error))
            return None
        attempt = Answering(
            id=attempt_id,
            outbox=outbox,
            pool=found,
            answer=Answer(work.request, specs, self._text, placed_at=self._clock()),
            specs=specs,
            deadline=self._loop.call_later(work.deadline_s, self._past_deadline, attempt_id),
            stage=stage,
            sequences=set(),
        )
        self._answers[attempt_id] = attempt
        self._expect(attempt, 0)
        self.idle.clear()
        return attempt

    def _expect(self, attempt: Answering, choice: int) -> SequenceId:
        """What the rank will say of this choice is this attempt's."""
        sequence = SequenceId(f"{attempt.id}:{choice}" if choice else attempt.id)
        attempt.sequences.add(sequence)
        self._choices[sequence] = attempt, choice
        return sequence

    def _begin_others(self, attempt: Answering) -> None:
        attempt.others_begun = True
        for choice, spec in enumerate(attempt.specs[1:], start=1):
            attempt.pool.rank.send(rank_messages.Run(self._expect(attempt, choice), spec))

    def _resolve(self, message: pb.Work) -> tuple[wire.Work, tuple[SequenceSpec, ...]]:
        if self.draining:
            raise Draining("the node takes no new work")
        work = wire.work(message)
        return work, sequence_specs(
            work.request,
            work.token_ids,
            context=self._context,
            vocab_size=self._vocab_size,
            end_ids=self._text.end_ids,
            deadline_s=work.deadline_s,
        )

    def _pool(self, number: int) -> Pool:
        if number >= len(self._pools):
            raise InternalError(f"pool {number} is not among the {len(self._pools)} of this node")
        return self._pools[number]

    def _reserved(self, message: rank_messages.Reserved) -> None:
        attempt = self._answers.get(message.sequence)
        if attempt is None:
            return  # aborted meanwhile; the rank has the Abort
        attempt.stage = "transfer"
        attempt.reservation = Reservation(
            attempt.pool.receiving, message, next(self._generations), lambda: self._advance(attempt)
        )
        attempt.cached_tokens = message.cached_tokens
        self._advance(attempt)

    def _advance(self, attempt: Answering) -> None:
        """Give the ticket away once it is awaited; generate once the blocks are there and the
        router has said so; fail with the transfer."""
        reservation = attempt.reservation
        if reservation is None or self._answers.get(attempt.id) is not attempt:
            return
        if reservation.expected and not attempt.ticket_given:
            attempt.ticket_given = True
            ticket = wire.ticket_message(reservation.ticket)
            attempt.outbox.send(wire.reserved(attempt.id, ticket, attempt.cached_tokens))
        if reservation.failure is not None:
            self._fail(attempt, TransferFailed(f"the hand-off failed: {reservation.failure}"))
        elif reservation.ready and attempt.start_wanted:
            attempt.answer.transfer = reservation.take()
            self.kv_bytes_received += attempt.answer.transfer.bytes
            attempt.reservation = None
            attempt.stage = "decode"
            attempt.pool.rank.send(rank_messages.Begin(SequenceId(attempt.id)))

    def _past_deadline(self, attempt_id: str) -> None:
        self._fail(self._answers[attempt_id], DeadlineExceeded("the deadline passed"))

    def _fail(self, attempt: Answering, error: RequestError) -> None:
        """End an attempt with an error: a Fault once the client has seen something, else Failed,
        upon which the router may place the request again."""
        self._free(attempt)
        if not attempt.answer.delta_sent:
            attempt.outbox.send(wire.failed(attempt.id, attempt.stage, error))
            return
        fault = pb.SequenceOutput(
            attempt_id=attempt.id, frames=attempt.answer.fault(error), last=True
        )
        attempt.outbox.send(pb.NodeMessage(step_output=pb.StepOutput(sequences=[fault])))

    def _free(self, attempt: Answering) -> None:
        """Forget an attempt. The hand-off stops before the rank may reuse the blocks."""
        del self._answers[attempt.id]
        attempt.deadline.cancel()
        over = [rank_messages.Abort(sequence) for sequence in sorted(attempt.sequences)]
        for abort in over:
            self._forget(attempt, abort.sequence)
        if attempt.reservation is None:
            attempt.pool.abort(over)
        else:
            attempt.reservation.end(partial(attempt.pool.abort, over))
        self._note_idle()

    def _forget(self, attempt: Answering, sequence: SequenceId) -> None:
        """The rank has ended it, or is about to hear that it shall."""
        attempt.sequences.discard(sequence)
        del self._choices[sequence]

    # ------------------------------------------------------------ prefill side

    def _prefill(self, message: pb.Prefill, outbox: Outbox) -> None:
        try:
            work, specs = self._resolve(message.work)
            pool = self._pool(message.pool)
        except RequestError as error:
            outbox.send(wire.failed(message.attempt_id, "prefill", error))
            return
        self.idle.clear()
        ticket = wire.ticket(message.ticket)
        job = PrefillJob(pool.sending, message.attempt_id, outbox, specs[0], ticket)
        self._errands.begin(job, work.deadline_s)

    def _abort(self, attempt_id: str) -> None:
        attempt = self._answers.get(attempt_id)
        if attempt is not None:
            self._free(attempt)
        self._errands.abort(attempt_id)

    def _note_idle(self) -> None:
        if not self._answers and not len(self._errands):
            self.idle.set()

    # ------------------------------------------------------------ the ranks

    def rank_said(self, number: int, message: RankMessage) -> None:
        """One message of the rank that schedules pool `number`."""
        if isinstance(message, rank_messages.Stepped):
            self._stepped(self._pools[number], message)
        elif isinstance(message, rank_messages.Reserved):
            self._reserved(message)
        elif isinstance(message, rank_messages.SequenceFailed):
            self._sequence_failed(message)

    def _stepped(self, pool: Pool, message: rank_messages.Stepped) -> None:
        pool.stats = message.stats
        outputs: dict[int, pb.StepOutput] = {}
        outboxes: dict[int, Outbox] = {}
        for output in message.outputs:
            known = self._choices.get(output.sequence)
            if known is None:
                continue  # aborted while the step was under way
            attempt, choice = known
            written = self._write(attempt, choice, output)
            if written is not None:
                outboxes[id(attempt.outbox)] = attempt.outbox
                outputs.setdefault(id(attempt.outbox), pb.StepOutput()).sequences.append(written)
        for key, step_output in outputs.items():
            outboxes[key].send(pb.NodeMessage(step_output=step_output))
        for progress in message.progress:
            self._errands.tell(progress.sequence, progress)
        change = pool.cache.change(message.stored, message.evicted)
        if change is not None:
            for session in self._sessions:
                session.send(change)

    def _write(
        self, attempt: Answering, choice: int, output: TokenOutput
    ) -> pb.SequenceOutput | None:
        if output.finish is not None:
            self._forget(attempt, output.sequence)
        try:
            chunk = attempt.answer.absorb(choice, output, now=self._clock())
        except Exception:
            # One answer's text must not end the others.
            log.exception("attempt %s: its text could not be written", attempt.id)
            self._fail(attempt, InternalError("the answer's text could not be written"))
            return None
        if chunk.cut:
            self._forget(attempt, output.sequence)
            attempt.pool.rank.send(rank_messages.Abort(output.sequence))
        if not attempt.others_begun:
            self._begin_others(attempt)
        if chunk.last:
            self._free(attempt)
        if not chunk.frames:
            return None
        return pb.SequenceOutput(
            attempt_id=attempt.id, frames=chunk.frames, delta=chunk.delta, last=chunk.last
        )

    def _sequence_failed(self, message: rank_messages.SequenceFailed) -> None:
        kind = BY_CODE.get(message.code, InternalError)
        error = kind(message.message)
        known = self._choices.get(message.sequence)
        if known is not None:
            attempt, _ = known
            self._forget(attempt, message.sequence)
            self._fail(attempt, error)
        self._errands.tell(message.sequence, error)
