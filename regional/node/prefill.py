"""A prefill node's errand: have the prompt's KV computed, and send each block as soon as it is."""

from __future__ import annotations

import asyncio

from core.engine.lending_messages import Held
from core.engine.messages import (
    Abort,
    Command,
    Prefill,
    PrefillProgress,
    Release,
)
from core.engine.plan import SequenceId
from core.errors import DeadlineExceeded, RequestError, TransferFailed
from core.kv.handoff import Failure, Outgoing
from core.kv.layout import Run
from core.kv.ticket import PieceKey, Ticket
from core.kv.transports.base import Piece, Shipment
from regional.node.imports import Imports, Want
from regional.node.notes import Notes
from regional.node.seams import Outbox, Sending
from regional.pb import node_pb2 as pb


class PrefillJob:
    """One attempt: an `errands.Job`. `run` sends and returns. What `imports` can bring of the
    prompt is not computed."""

    def __init__(self, imports: Imports, want: Want, ticket: Ticket, notes: Notes) -> None:
        self.attempt_id = want.attempt_id
        self.sequence = SequenceId(f"{want.attempt_id}:prefill")
        self.ended_by: RequestError | None = None
        self.sent_bytes = 0
        self.notes = notes
        self._computed = self._cached = 0
        self._imports = imports
        self._want = want
        self._node: Sending = want.pool.sending
        self._ticket = ticket
        self._runs: dict[tuple[int, int], tuple[Run, ...]] = {}
        """Where the blocks of each endpoint, by its rank and group, are gathered from."""
        self._mailbox: asyncio.Queue[PrefillProgress | RequestError] = asyncio.Queue()

    @property
    def outbox(self) -> Outbox:
        return self._want.outbox

    @property
    def namespace(self) -> str:
        return self._want.spec.namespace

    @property
    def facts(self) -> dict[str, int]:
        spec = self._want.spec
        prompt = len(spec.token_ids) + len(spec.output_ids)
        return {
            "prompt": prompt,
            "cached": self._cached,
            "computed": self._computed,
            "kv_bytes": self.sent_bytes,
        }

    def stage(self, error: RequestError) -> str:
        return "transfer" if isinstance(error, TransferFailed) else "prefill"

    def tell(self, news: PrefillProgress | Held | RequestError) -> None:
        """Progress of the rank, or the end of the sequence there."""
        if not isinstance(news, Held):
            self._mailbox.put_nowait(news)

    async def run(self, deadline_s: float) -> pb.NodeMessage:
        """Raises RequestError. However it ends, the rank's blocks are free afterwards."""
        if self._ticket.empty:  # the receiver holds everything: nothing to compute for it
            self._cached = len(self._want.spec.token_ids) - 1
            done = pb.PrefillDone(attempt_id=self.attempt_id, cached_tokens=self._cached)
            return pb.NodeMessage(prefill_done=done)
        try:
            async with asyncio.timeout(deadline_s):
                return pb.NodeMessage(prefill_done=await self._compute_and_send())
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed during the prefill") from error

    async def _compute_and_send(self) -> pb.PrefillDone:
        started = self._node.clock()
        spec = self._want.spec
        prompt_tokens = len(spec.token_ids) + len(spec.output_ids)
        for endpoint in self._ticket.endpoints:
            runs = self._node.memory.runs_for(endpoint)
            self._runs[endpoint.rank, endpoint.group] = runs
        outgoing = Outgoing(self._ticket, prompt_tokens=prompt_tokens, now=started)
        # The ticket is presented, and its lease renewed, while what others hold is brought here.
        bringing = self._imports.before(self._want, lambda _: self._compute())
        if bringing is not None:
            self.notes.begin("import")
        ending: Command = Abort(self.sequence)
        try:
            shipment = await self._node.carrier.open(self._ticket, self._node.model, self.tell)
            try:
                outgoing.opened(now=self._node.clock())
                progress = await self._ship(outgoing, shipment)
                self.notes.end("compute")
                await shipment.finish(progress.computed_tokens)
                outgoing.acknowledged()
                self.notes.end("transfer")
                ending = Release(self.sequence)
            finally:
                await shipment.close()
        finally:
            outgoing.fail(Failure.ABORTED)
            self.sent_bytes = outgoing.sent_bytes
            if bringing is not None:
                bringing.cancel()
            self._node.rank.send(ending)
        self._cached = prompt_tokens - 1 - self._computed
        return pb.PrefillDone(
            attempt_id=self.attempt_id,
            computed_tokens=self._computed,
            cached_tokens=self._cached,
            kv_bytes=outgoing.sent_bytes,
            seconds=self._node.clock() - started,
        )

    def _compute(self) -> None:
        self.notes.end("import")
        self.notes.begin("compute")
        self._node.rank.send(Prefill(self.sequence, self._want.spec))

    async def _ship(self, outgoing: Outgoing, shipment: Shipment) -> PrefillProgress:
        """Send blocks as they become ready; returns with the last progress."""
        while True:
            progress = await self._progress(outgoing, shipment)
            self._computed = progress.computed_tokens
            keys = outgoing.due(progress.ready_tokens, complete=progress.complete)
            if keys:
                self.notes.begin("transfer")
                await shipment.send([self._piece(key, progress) for key in keys])
                outgoing.sent(keys, now=self._node.clock())
            if progress.complete:
                outgoing.ended()
                return progress

    async def _progress(self, outgoing: Outgoing, shipment: Shipment) -> PrefillProgress:
        """The newest progress; keeps the lease alive while the rank computes."""
        while True:
            try:
                async with asyncio.timeout(outgoing.renew_in(self._node.clock())):
                    news = await self._mailbox.get()
            except TimeoutError:
                await shipment.renew()
                outgoing.renewed(now=self._node.clock())
                continue
            if isinstance(news, RequestError):
                raise news
            if self._mailbox.empty():
                return news

    def _piece(self, key: PieceKey, progress: PrefillProgress) -> Piece:
        block = progress.blocks[key.group][key.block]
        return self._node.memory.piece(key, block, self._runs[key.rank, key.group])
