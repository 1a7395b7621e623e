"""A prefill node's errand: have the prompt's KV computed, and send each block as soon as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from core.engine.messages import (
    Abort,
    Command,
    Prefill,
    PrefillProgress,
    Release,
    SequenceSpec,
)
from core.engine.plan import SequenceId
from core.errors import DeadlineExceeded, RequestError
from core.kv.handoff import Failure, Outgoing
from core.kv.layout import Run
from core.kv.shards import PoolMemory
from core.kv.ticket import PieceKey, Ticket
from core.kv.transports.base import Carrier, Piece, Shipment
from regional.pb import node_pb2 as pb


class Rank(Protocol):
    """Takes commands: the link to the rank that schedules a pool, or a rank of the test's own."""

    def send(self, command: Command) -> None: ...


class Outbox(Protocol):
    """One session with a router. What is sent after its end is dropped."""

    def send(self, message: pb.NodeMessage) -> None: ...


@dataclass(frozen=True, slots=True)
class Sending:
    """What the errands of a pool share. `model` is a `core.kv.ticket.model_digest`."""

    rank: Rank
    memory: PoolMemory
    carrier: Carrier
    model: bytes
    clock: Callable[[], float]


class PrefillJob:
    """One attempt. `run` sends and returns; `fail` ends it from outside with an error to report."""

    def __init__(
        self, node: Sending, attempt_id: str, outbox: Outbox, spec: SequenceSpec, ticket: Ticket
    ) -> None:
        self.attempt_id = attempt_id
        self.outbox = outbox
        self.sequence = SequenceId(f"{attempt_id}:prefill")
        self.ended_by: RequestError | None = None
        self.sent_bytes = 0
        self._node = node
        self._spec = spec
        self._ticket = ticket
        self._runs: dict[tuple[int, int], tuple[Run, ...]] = {}
        """Where the blocks of each endpoint, by its rank and group, are gathered from."""
        self._mailbox: asyncio.Queue[PrefillProgress | RequestError] = asyncio.Queue()

    def tell(self, news: PrefillProgress | RequestError) -> None:
        """Progress of the rank, or the end of the sequence there."""
        self._mailbox.put_nowait(news)

    async def run(self, deadline_s: float) -> pb.PrefillDone:
        """Raises RequestError. However it ends, the rank's blocks are free afterwards."""
        if self._ticket.empty:  # the receiver holds everything: nothing to compute for it
            return pb.PrefillDone(
                attempt_id=self.attempt_id, cached_tokens=len(self._spec.token_ids) - 1
            )
        try:
            async with asyncio.timeout(deadline_s):
                return await self._compute_and_send()
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed during the prefill") from error

    async def _compute_and_send(self) -> pb.PrefillDone:
        started = self._node.clock()
        prompt_tokens = len(self._spec.token_ids) + len(self._spec.output_ids)
        for endpoint in self._ticket.endpoints:
            runs = self._node.memory.runs_for(endpoint)
            self._runs[endpoint.rank, endpoint.group] = runs
        outgoing = Outgoing(self._ticket, prompt_tokens=prompt_tokens, now=started)
        self._node.rank.send(Prefill(self.sequence, self._spec))
        ending: Command = Abort(self.sequence)
        try:
            shipment = await self._node.carrier.open(self._ticket, self._node.model, self.tell)
            try:
                outgoing.opened(now=self._node.clock())
                progress = await self._ship(outgoing, shipment)
                await shipment.finish(progress.computed_tokens)
                outgoing.acknowledged()
                ending = Release(self.sequence)
            finally:
                await shipment.close()
        finally:
            outgoing.fail(Failure.ABORTED)
            self.sent_bytes = outgoing.sent_bytes
            self._node.rank.send(ending)
        return pb.PrefillDone(
            attempt_id=self.attempt_id,
            computed_tokens=progress.computed_tokens,
            cached_tokens=prompt_tokens - 1 - progress.computed_tokens,
            kv_bytes=outgoing.sent_bytes,
            seconds=self._node.clock() - started,
        )

    async def _ship(self, outgoing: Outgoing, shipment: Shipment) -> PrefillProgress:
        """Send blocks as they become ready; returns with the last progress."""
        while True:
            progress = await self._progress(outgoing, shipment)
            keys = outgoing.due(progress.ready_tokens, complete=progress.complete)
            if keys:
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
        runs = self._runs[key.rank, key.group]
        return Piece(key=key, parts=self._node.memory.parts(key.group, block, runs))
