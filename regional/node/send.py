"""The source's errand of a pull: what the cache holds goes to whoever gave the ticket. Nothing is
computed, and nothing is promised: what the cache lacks is said."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

from core.engine.lending_messages import Held, Hold
from core.engine.messages import (
    Abort,
    PrefillProgress,
    Release,
)
from core.engine.plan import SequenceId
from core.errors import DeadlineExceeded, RequestError, TransferFailed
from core.kv.handoff import Failure, Outgoing
from core.kv.ticket import PieceKey, Ticket
from core.kv.transports.base import Piece
from regional.node.notes import Notes
from regional.node.seams import Outbox, Sending
from regional.pb import node_pb2 as pb

_PIECES_AT_ONCE = 32
"""Checks are taken of so many pieces before they leave: then others get a turn."""


class SendJob:
    """One attempt: an `errands.Job`. `token_ids` are whole blocks from the prompt's first on.
    Raises TransferFailed when the ticket is for KV of another shape than ours."""

    def __init__(
        self,
        node: Sending,
        attempt_id: str,
        outbox: Outbox,
        token_ids: tuple[int, ...],
        namespace: str,
        ticket: Ticket,
        notes: Notes,
    ) -> None:
        self.attempt_id = attempt_id
        self.outbox = outbox
        self.sequence = SequenceId(f"{attempt_id}:send")
        self.ended_by: RequestError | None = None
        self.sent_bytes = 0
        self.notes = notes
        self._node = node
        self._found = 0
        self.namespace = namespace
        self._token_ids = token_ids
        self._ticket = ticket
        self._runs = {(one.rank, one.group): node.memory.runs_for(one) for one in ticket.endpoints}
        loop = asyncio.get_running_loop()
        self._held: asyncio.Future[Held | RequestError] = loop.create_future()
        self._given_up: RequestError | None = None

    @property
    def facts(self) -> dict[str, int]:
        asked = len(self._token_ids)
        return {"prompt": asked, "held": self._found, "kv_bytes": self.sent_bytes}

    def stage(self, error: RequestError) -> str:
        return "send"

    def tell(self, news: PrefillProgress | Held | RequestError) -> None:
        """The rank's word on what it holds, or the receiver's that it wants no more."""
        if isinstance(news, RequestError):
            self._given_up = news
        if not isinstance(news, PrefillProgress) and not self._held.done():
            self._held.set_result(news)

    async def run(self, deadline_s: float) -> pb.NodeMessage:
        """Raises RequestError. However it ends, the cached blocks are let go of afterwards."""
        try:
            async with asyncio.timeout(deadline_s):
                return pb.NodeMessage(sent=await self._hold_and_send())
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed while KV was sent") from error

    async def _hold_and_send(self) -> pb.Sent:
        started = self._node.clock()
        wanted = len(self._token_ids)
        # One more token than is sent: a ticket is for all but the last of a prompt.
        outgoing = Outgoing(self._ticket, prompt_tokens=wanted + 1, now=started)
        rank = self._node.rank
        rank.send(Hold(sequence=self.sequence, token_ids=self._token_ids, namespace=self.namespace))
        ending: Abort | Release = Abort(self.sequence)
        try:
            held = await self._held
            if isinstance(held, RequestError):
                raise held
            self._found = held.tokens
            if self._useful(held):
                await self._send(outgoing, held)
            ending = Release(self.sequence)
        finally:
            outgoing.fail(Failure.ABORTED)
            self.sent_bytes = outgoing.sent_bytes
            rank.send(ending)
        return pb.Sent(
            attempt_id=self.attempt_id,
            tokens=held.tokens,
            lacking_tokens=wanted - held.tokens,
            kv_bytes=outgoing.sent_bytes,
            seconds=self._node.clock() - started,
        )

    def _useful(self, held: Held) -> bool:
        """A start of what was asked for is of use, unless a window forgets: then the blocks that
        are wanted of that group are those before the end."""
        if self._ticket.empty or not held.tokens:
            return False
        return held.tokens == len(self._token_ids) or not self._node.memory.forgets

    async def _send(self, outgoing: Outgoing, held: Held) -> None:
        """Where blocks are lacking the receiver refuses the end, and keeps what it has verified."""
        clock = self._node.clock
        shipment = await self._node.carrier.open(self._ticket, self._node.model, self.tell)
        try:
            outgoing.opened(now=clock())
            keys = iter(outgoing.due(held.tokens, complete=False))
            while part := list(itertools.islice(keys, _PIECES_AT_ONCE)):
                if self._given_up is not None:
                    raise self._given_up
                await shipment.send([self._piece(key, held) for key in part])
                outgoing.sent(part, now=clock())
            if outgoing.left:
                with suppress(TransferFailed):
                    await shipment.finish(0)
                return
            outgoing.ended()
            await shipment.finish(0)
            outgoing.acknowledged()
        finally:
            await shipment.close()

    def _piece(self, key: PieceKey, held: Held) -> Piece:
        block = held.blocks[key.group][key.block]
        return self._node.memory.piece(key, block, self._runs[key.rank, key.group])
