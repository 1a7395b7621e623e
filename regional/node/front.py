"""The node's control: what routers ask and what the ranks report meet here.

What decodes here is in `Answers`; what is read for other nodes, or sent to them, in `Errands`; what
comes into the cache without being computed, in `Imports`. All methods run on the event loop and do
not wait.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

from core.engine.lending_messages import Held
from core.engine.messages import (
    EngineStats,
    RankMessage,
    Reserved,
    SequenceFailed,
    Stepped,
)
from core.engine.purge_messages import Purged
from core.errors import BY_CODE, Draining, InternalError, RequestError
from core.telemetry import SILENT, Telemetry
from regional.node import wire
from regional.node.admission import Admission
from regional.node.answer import Text
from regional.node.answers import Answers
from regional.node.errands import Errands
from regional.node.imports import Imports, Want, whole_blocks
from regional.node.notes import Notebook
from regional.node.partings import Partings
from regional.node.pool import Pool, total
from regional.node.prefill import PrefillJob
from regional.node.purges import Purges
from regional.node.seams import Outbox
from regional.node.send import SendJob
from regional.node.tiers.node_tiers import NodeTiers
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
        tiers: NodeTiers | None = None,
        name: str = "-",
        telemetry: Telemetry = SILENT,
    ) -> None:
        """`name`: the node's, for its spans."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._admission = Admission(
            pools, context=context, vocab_size=vocab_size, end_ids=text.end_ids
        )
        generations = itertools.count(1)
        self._imports = Imports(tasks, generations, tier=tiers, ended=self._note_idle)
        self._book = Notebook(name, clock, telemetry)
        self._answers = Answers(
            self._admission,
            text,
            imports=self._imports,
            partings=Partings(tasks, tiers),
            generations=generations,
            clock=clock,
            book=self._book,
            ended=self._note_idle,
        )
        self._errands = Errands(tasks, self._note_idle)
        self._tiers = tiers
        self._purges = Purges(self._admission.pools, tiers, tasks, self._end_namespace)
        self._sessions: list[Outbox] = []
        self._loop = asyncio.get_running_loop()

    @property
    def stats(self) -> EngineStats:
        """Of all pools together."""
        return total([pool.stats for pool in self._admission.pools])

    @property
    def draining(self) -> bool:
        return self._admission.draining

    @property
    def kv_bytes_sent(self) -> int:
        return self._errands.sent_bytes

    @property
    def kv_bytes_received(self) -> int:
        return self._answers.kv_bytes_received + self._imports.bytes_received

    # ------------------------------------------------------------ sessions

    def session_opened(self, outbox: Outbox) -> None:
        """A router has been joined: tell it what the cache holds, and from now on what changes."""
        self._sessions.append(outbox)
        self._tell_caches(outbox)

    def session_closed(self, outbox: Outbox) -> None:
        """Abort every attempt that came through this session."""
        self._sessions.remove(outbox)
        self._answers.session_closed(outbox)
        self._errands.session_closed(outbox)

    def handle(self, message: pb.RouterMessage, outbox: Outbox) -> None:
        """One message of a router, after its Welcome."""
        match message.WhichOneof("body"):
            case "reserve":
                self._answers.reserve(message.reserve, outbox)
            case "prefill":
                self._prefill(message.prefill, outbox)
            case "start":
                self._answers.start(message.start, outbox)
            case "abort":
                self._answers.abort(message.abort.attempt_id, message.abort.reason)
                self._errands.abort(message.abort.attempt_id, message.abort.reason)
            case "send":
                self._send(message.send, outbox)
            case "proceed":
                self._imports.proceed(message.proceed.attempt_id)
            case "drain":
                self.drain(message.drain.grace_s)
            case "purge":
                self._purges.begin(message.purge, outbox)
            case "recount":
                self._tell_caches(outbox)
            case other:
                log.warning("a message of kind %s is not known here", other)
        self._note_idle()

    def _tell_caches(self, outbox: Outbox) -> None:
        for pool in self._admission.pools:
            for message in pool.cache.snapshot():
                outbox.send(message)
        for message in self._tiers.snapshot() if self._tiers is not None else ():
            outbox.send(message)

    def tell(self, message: pb.NodeMessage) -> None:
        """Every router."""
        for session in self._sessions:
            session.send(message)

    def _end_namespace(self, namespace: str, error: RequestError) -> int:
        answers = self._answers.end_namespace(namespace, error)
        return answers + self._errands.end_namespace(namespace, error)

    def close(self) -> None:
        """Take no new work; what runs goes on to its end."""
        if not self.draining:
            self._admission.draining = True
            log.info("draining: %d answers, %d prefills", len(self._answers), len(self._errands))

    def drain(self, grace_s: float) -> None:
        """Take no new work; what still runs after `grace_s` goes on elsewhere, or fails as
        retryable."""
        self.close()
        self._loop.call_later(grace_s, self.give_up, Draining("the node stops"))

    def give_up(self, error: RequestError) -> None:
        """Let what can go on elsewhere do so; the rest ends with `error`."""
        self._answers.move_all(error)
        self._errands.fail_all(error)

    def fail_all(self, error: RequestError) -> None:
        """End everything that is under way with `error`."""
        self._answers.fail_all(error)
        self._errands.fail_all(error)

    def _prefill(self, message: pb.Prefill, outbox: Outbox) -> None:
        notes = self._book.open("prefilled", message.attempt_id)
        try:
            taken = self._admission.take(message.work, message.pool)
        except RequestError as error:
            notes.refused(error)
            outbox.send(wire.failed(message.attempt_id, "prefill", error))
            return
        notes.taken(taken.work.request)
        want = Want(
            attempt_id=message.attempt_id,
            pool=taken.pool,
            spec=taken.specs[0],
            outbox=outbox,
            pull_tokens=taken.work.pull_tokens,
            pull_s=taken.work.pull_s,
        )
        job = PrefillJob(self._imports, want, wire.ticket(message.ticket), notes)
        self._errands.begin(job, taken.work.deadline_s)

    def _send(self, message: pb.Send, outbox: Outbox) -> None:
        notes = self._book.open("sent", message.attempt_id)
        try:
            taken = self._admission.take(message.work, message.pool)
            notes.taken(taken.work.request)
            job = SendJob(
                taken.pool.sending,
                message.attempt_id,
                outbox,
                whole_blocks(taken.specs[0])[: message.tokens],
                taken.specs[0].namespace,
                wire.ticket(message.ticket),
                notes,
            )
        except RequestError as error:
            notes.refused(error)
            outbox.send(wire.failed(message.attempt_id, "send", error))
            return
        self._errands.begin(job, taken.work.deadline_s)

    def _note_idle(self) -> None:
        """Idle means: nothing of anybody's is left here."""
        if len(self._answers) or len(self._errands) or len(self._imports):
            self.idle.clear()
        else:
            self.idle.set()

    # ------------------------------------------------------------ the ranks

    def rank_said(self, number: int, message: RankMessage) -> None:
        """One message of the rank that schedules pool `number`."""
        if isinstance(message, Stepped):
            self._stepped(self._admission.pools[number], message)
        elif isinstance(message, Reserved):
            if not self._imports.reserved(message):
                self._answers.reserved(message)
        elif isinstance(message, Held):
            self._errands.tell(message.sequence, message)
            self._tell_tiers(number, message)
        elif isinstance(message, Purged):
            self._purges.purged(number, message)
        elif isinstance(message, SequenceFailed):
            self._imports.failed(message)
            self._answers.sequence_failed(message)
            kind = BY_CODE.get(message.code, InternalError)
            self._errands.tell(message.sequence, kind(message.message))
            self._tell_tiers(number, message)

    def _tell_tiers(self, number: int, message: Held | SequenceFailed) -> None:
        if self._tiers is not None:
            self._tiers.heard(number, message)

    def _stepped(self, pool: Pool, message: Stepped) -> None:
        pool.stats = message.stats
        self._answers.stepped(message.outputs)
        for given_back in message.given_back:
            self._answers.given_back(given_back)
        for progress in message.progress:
            self._errands.tell(progress.sequence, progress)
        change = pool.cache.change(message.stored, message.evicted)
        if change is not None:
            self.tell(change)
