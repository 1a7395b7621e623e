"""The answers that this node gives: every attempt that decodes here, from its admission to its end.

An attempt is bound to the session that it came through, and leaves by `_free` alone. All methods
run on the event loop and do not wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec

from core.engine.messages import (
    Abort,
    Begin,
    GivenBack,
    Reserve,
    Reserved,
    Run,
    SequenceFailed,
    TokenOutput,
)
from core.engine.plan import SequenceId
from core.errors import BY_CODE, DeadlineExceeded, InternalError, RequestError, TransferFailed
from regional.node import wire
from regional.node.admission import Admission
from regional.node.answer import Answer, Left, Text, Transfer
from regional.node.answering import Answering
from regional.node.imports import Imports, Want
from regional.node.notes import PREEMPTED, ROUTER_LOST, Notebook, aborted
from regional.node.partings import Partings
from regional.node.receiving import Reservation
from regional.node.seams import Outbox
from regional.pb import node_pb2 as pb

log = logging.getLogger("skerry.node")


class Answers:
    """`ended` is called after each attempt, when nothing of it is left here. `generations` counts
    the tickets of the node."""

    def __init__(
        self,
        admission: Admission,
        text: Text,
        *,
        imports: Imports,
        partings: Partings,
        generations: Iterator[int],
        clock: Callable[[], float],
        book: Notebook,
        ended: Callable[[], None],
    ) -> None:
        self.kv_bytes_received = 0
        self._admission = admission
        self._text = text
        self._imports = imports
        self._partings = partings
        self._generations = generations
        self._clock = clock
        self._book = book
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._answers: dict[str, Answering] = {}
        self._choices: dict[SequenceId, tuple[Answering, int]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    # ------------------------------------------------------------ what routers ask

    def reserve(self, message: pb.Reserve, outbox: Outbox) -> None:
        attempt = self._admit(
            message.attempt_id, message.work, outbox, message.pool, stage="reserve"
        )
        if attempt is not None:
            self._bring(attempt, message.work, self._set_aside)

    def start(self, message: pb.Start, outbox: Outbox) -> None:
        if message.HasField("work"):
            attempt = self._admit(
                message.attempt_id, message.work, outbox, message.pool, stage="decode"
            )
            if attempt is not None:
                attempt.answer.queued_s = message.queued_s
                attempt.start_wanted = True
                self._answer(attempt, message.work)
            return
        reserved = self._answers.get(message.attempt_id)
        if reserved is None:
            error = TransferFailed("the reservation is gone")
            outbox.send(wire.failed(message.attempt_id, "transfer", error))
            return
        reserved.answer.queued_s = message.queued_s
        reserved.start_wanted = True
        self._advance(reserved)

    def abort(self, attempt_id: str, reason: str) -> None:
        """Forget an attempt and tell its router nothing; an unknown one is nothing."""
        attempt = self._answers.get(attempt_id)
        if attempt is not None:
            self._free(attempt, aborted(reason))

    def session_closed(self, outbox: Outbox) -> None:
        for attempt in [one for one in self._answers.values() if one.outbox is outbox]:
            self._free(attempt, ROUTER_LOST)

    def fail_all(self, error: RequestError) -> None:
        for attempt in list(self._answers.values()):
            self._fail(attempt, error)

    def move_all(self, error: RequestError) -> None:
        """End everything here: what can go on at another node from where it stands does, the rest
        fails with `error`."""
        for attempt in list(self._answers.values()):
            if attempt.answer.delta_sent and attempt.specs[0].move_min_tokens:
                self._leave(attempt, attempt.answer.left(now=self._clock()))
            else:
                self._fail(attempt, error)

    def end_namespace(self, namespace: str, error: RequestError) -> int:
        """End every attempt of a namespace: how many that were."""
        ended = [one for one in self._answers.values() if one.specs[0].namespace == namespace]
        for attempt in ended:
            self._fail(attempt, error)
        return len(ended)

    # ------------------------------------------------------------ what the ranks say

    def reserved(self, message: Reserved) -> None:
        attempt = self._answers.get(message.sequence)
        if attempt is None:
            return  # aborted meanwhile; the rank has the Abort
        attempt.stage = "transfer"
        attempt.notes.end("reserve")
        attempt.notes.begin("receive")
        attempt.reservation = Reservation(
            attempt.pool.receiving, message, next(self._generations), lambda: self._advance(attempt)
        )
        attempt.cached_tokens = message.cached_tokens
        self._advance(attempt)

    def stepped(self, outputs: Iterable[TokenOutput]) -> None:
        """Pass on what one step brought: one message a session."""
        said: dict[int, pb.StepOutput] = {}
        outboxes: dict[int, Outbox] = {}
        for output in outputs:
            known = self._choices.get(output.sequence)
            if known is None:
                continue  # aborted while the step was under way
            attempt, choice = known
            written = self._write(attempt, choice, output)
            if written is not None:
                outboxes[id(attempt.outbox)] = attempt.outbox
                said.setdefault(id(attempt.outbox), pb.StepOutput()).sequences.append(written)
        for key, step_output in said.items():
            outboxes[key].send(pb.NodeMessage(step_output=step_output))

    def given_back(self, message: GivenBack) -> None:
        """The rank has no room for it any more: whoever placed it here places it again, from where
        it stands."""
        known = self._choices.get(message.sequence)
        if known is None:
            return  # ended by its text, or unwanted: the rank has the Abort
        attempt, _ = known
        self._forget(attempt, message.sequence)
        left = attempt.answer.left(
            computed_tokens=message.computed_tokens,
            read_tokens=message.read_tokens,
            now=self._clock(),
        )
        then = partial(self._leave, attempt, left)
        if message.tokens:
            spec, output_ids = attempt.specs[0], left.token_ids
            self._partings.begin(attempt.pool, spec, output_ids, message, then)
        else:
            then()

    def sequence_failed(self, message: SequenceFailed) -> None:
        known = self._choices.get(message.sequence)
        if known is not None:
            attempt, _ = known
            self._forget(attempt, message.sequence)
            kind = BY_CODE.get(message.code, InternalError)
            self._fail(attempt, kind(message.message))

    # ------------------------------------------------------------ inside

    def _leave(self, attempt: Answering, left: Left) -> None:
        """Back to its router, unless it has ended meanwhile."""
        if self._answers.get(attempt.id) is attempt:
            self._free(attempt, PREEMPTED)
            attempt.outbox.send(wire.preempted(attempt.id, left))

    def _bring(
        self, attempt: Answering, work: pb.Work, then: Callable[[Answering, Transfer], None]
    ) -> None:
        """Have what is not to be computed brought into the cache first."""
        want = Want(
            attempt_id=attempt.id,
            pool=attempt.pool,
            spec=attempt.specs[0],
            outbox=attempt.outbox,
            pull_tokens=work.pull_tokens,
            pull_s=work.pull_s,
        )
        attempt.bringing = self._imports.before(want, partial(then, attempt))
        if attempt.bringing is not None:
            attempt.notes.begin("import")

    def _set_aside(self, attempt: Answering, _: Transfer) -> None:
        attempt.notes.end("import")
        attempt.notes.begin("reserve")
        attempt.pool.rank.send(Reserve(SequenceId(attempt.id), attempt.specs[0]))

    def _run(self, attempt: Answering, came: Transfer) -> None:
        attempt.answer.transfer = came
        attempt.notes.end("import")
        attempt.notes.begin("prefill")
        attempt.pool.rank.send(Run(SequenceId(attempt.id), attempt.specs[0]))

    def _answer(self, attempt: Answering, work: pb.Work) -> None:
        """Read the prompt here and answer, unless the answer it is to go on with was whole."""
        whole = attempt.answer.whole(now=self._clock())
        if whole is None:
            self._bring(attempt, work, self._run)
            return
        self._free(attempt, "ok")
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
        notes = self._book.open("answered", attempt_id)
        try:
            taken = self._admission.take(message, pool)
        except RequestError as error:
            notes.refused(error)
            outbox.send(wire.failed(attempt_id, stage, error))
            return None
        work, keep = taken.work, self._partings.keep(taken.pool)
        notes.taken(work.request)
        specs = tuple(msgspec.structs.replace(one, keep_blocks=keep) for one in taken.specs)
        attempt = Answering(
            id=attempt_id,
            outbox=outbox,
            pool=taken.pool,
            answer=Answer(
                work.request, specs, self._text, placed_at=self._clock(), spent=work.spent
            ),
            notes=notes,
            specs=specs,
            deadline=self._loop.call_later(work.deadline_s, self._past_deadline, attempt_id),
            stage=stage,
            sequences=set(),
        )
        self._answers[attempt_id] = attempt
        self._expect(attempt, 0)
        return attempt

    def _expect(self, attempt: Answering, choice: int) -> SequenceId:
        """What the rank will say of this choice is this attempt's."""
        sequence = SequenceId(f"{attempt.id}:{choice}" if choice else attempt.id)
        attempt.sequences.add(sequence)
        self._choices[sequence] = attempt, choice
        return sequence

    def _begin_others(self, attempt: Answering) -> None:
        attempt.others_begun = True
        attempt.notes.end("prefill")
        attempt.notes.begin("decode")
        for choice, spec in enumerate(attempt.specs[1:], start=1):
            attempt.pool.rank.send(Run(self._expect(attempt, choice), spec))

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
            attempt.notes.end("receive")
            attempt.notes.begin("prefill")
            attempt.pool.rank.send(Begin(SequenceId(attempt.id)))

    def _past_deadline(self, attempt_id: str) -> None:
        self._fail(self._answers[attempt_id], DeadlineExceeded("the deadline passed"))

    def _fail(self, attempt: Answering, error: RequestError) -> None:
        """End an attempt with an error: a Fault once the client has seen something, else Failed,
        upon which the router may place the request again."""
        self._free(attempt, error.code)
        if not attempt.answer.delta_sent:
            attempt.outbox.send(wire.failed(attempt.id, attempt.stage, error))
            return
        fault = pb.SequenceOutput(
            attempt_id=attempt.id, frames=attempt.answer.fault(error), last=True
        )
        attempt.outbox.send(pb.NodeMessage(step_output=pb.StepOutput(sequences=[fault])))

    def _free(self, attempt: Answering, outcome: str) -> None:
        """Forget an attempt. The hand-off stops before the rank may reuse the blocks."""
        del self._answers[attempt.id]
        attempt.deadline.cancel()
        if attempt.bringing is not None:
            attempt.bringing.cancel()
        over = [Abort(sequence) for sequence in sorted(attempt.sequences)]
        for abort in over:
            self._forget(attempt, abort.sequence)
        if attempt.reservation is None:
            attempt.pool.abort(over)
        else:
            attempt.reservation.end(partial(attempt.pool.abort, over))
        attempt.tell(outcome, now=self._clock())
        self._ended()

    def _forget(self, attempt: Answering, sequence: SequenceId) -> None:
        """The rank has ended it, or is about to hear that it shall."""
        attempt.sequences.discard(sequence)
        del self._choices[sequence]

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
            attempt.pool.rank.send(Abort(output.sequence))
        if not attempt.others_begun:
            self._begin_others(attempt)
        if chunk.last:
            self._free(attempt, "ok")
        if not chunk.frames:
            return None
        return pb.SequenceOutput(
            attempt_id=attempt.id, frames=chunk.frames, delta=chunk.delta, last=chunk.last
        )
