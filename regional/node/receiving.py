"""A decode node's reservation: blocks set aside, a ticket given, a lease that runs.

`end` is the only way out besides `take`, and its order is the safety of the hand-off: the machine
fails first, then the landing stops writing, and only after that may the caller tell the rank to
free the blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from core.engine.messages import Reserved
from core.kv.handoff import Failure, Incoming, Phase
from core.kv.shards import PoolMemory
from core.kv.ticket import Ticket, new_ticket_id
from core.kv.transports.base import Arrival, Landing
from regional.node.answer import Transfer


@dataclass(frozen=True, slots=True)
class Receiving:
    """What reservations of a pool share. `model` is a `core.kv.ticket.model_digest`."""

    memory: PoolMemory
    landing: Landing
    model: bytes
    lease_s: float
    clock: Callable[[], float]


class Reservation:
    """One ticket. `changed` is called when the transfer has become ready or has failed."""

    def __init__(
        self, node: Receiving, reserved: Reserved, generation: int, changed: Callable[[], None]
    ) -> None:
        self._node = node
        self._changed = changed
        self.ticket = Ticket(
            id=new_ticket_id(),
            generation=generation,
            lease_s=node.lease_s,
            endpoints=tuple(node.memory.endpoints(node.landing.address, reserved.fill)),
        )
        self._incoming = Incoming(self.ticket, node.model, now=node.clock())
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(node.lease_s, self._check_lease)
        if not self.ticket.empty:
            places = {
                key: node.memory.block(key.rank, key.group, reserved.fill[key.group][key.block])
                for endpoint in self.ticket.endpoints
                for key in endpoint.pieces()
            }
            node.landing.expect(
                Arrival(incoming=self._incoming, places=places, changed=self._settled)
            )

    @property
    def ready(self) -> bool:
        return self._incoming.phase is Phase.READY

    @property
    def failure(self) -> Failure | None:
        return self._incoming.failure

    def take(self) -> Transfer:
        """The blocks are verified: from now on they are the rank's alone."""
        self._incoming.take()
        self._timer.cancel()
        return Transfer(
            computed_tokens=self._incoming.computed_tokens,
            seconds=self._incoming.transfer_s,
            bytes=self._incoming.received_bytes,
        )

    def end(self) -> None:
        """Nobody wants the transfer any more. When this returns nothing writes into its blocks."""
        self._timer.cancel()
        self._incoming.fail(Failure.ABORTED)
        self._node.landing.withdraw(self._incoming)

    def _settled(self) -> None:
        if self.failure is not None:
            self._timer.cancel()
        self._changed()

    def _check_lease(self) -> None:
        """Renewals move the end of the lease; the timer only looks when it could have come."""
        now = self._node.clock()
        if self._incoming.tick(now):
            self._node.landing.withdraw(self._incoming)
            self._settled()
        elif not self._incoming.over:
            self._timer = self._loop.call_later(
                max(0.0, self._incoming.expires_at - now), self._check_lease
            )
