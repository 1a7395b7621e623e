"""A decode node's reservation: blocks set aside, a ticket given, a lease that runs.

Each host that has ranks of the pool receives its own share; the transfer is ready when all shares
are. `end` is the only way out besides `take`, and its order is the safety of the hand-off: the
machine fails first, then the landing stops writing, and only after that may the caller tell the
rank to free the blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.engine.messages import Reserved
from core.kv.handoff import Failure, Incoming, Phase
from core.kv.shards import PoolMemory, endpoints
from core.kv.ticket import Endpoint, Ticket, new_ticket_id
from core.kv.transports.base import Arrival, Landing
from regional.node.answer import Transfer

Fill = tuple[Mapping[int, int], ...]
"""Of each group: the prompt's missing blocks, and the pool's blocks set aside for them."""


class Share(Protocol):
    """What one host receives of a transfer."""

    @property
    def expected(self) -> bool:
        """It listens for the sender: the ticket may be given away."""
        ...

    @property
    def ready(self) -> bool: ...

    @property
    def failure(self) -> Failure | None: ...

    def take(self) -> Transfer:
        """The blocks are verified: from now on they are the rank's alone."""
        ...

    def end(self, then: Callable[[], None]) -> None:
        """Nobody wants the transfer any more; `then` is called when nothing writes into its blocks,
        at once where that can be."""
        ...


class Host(Protocol):
    """A machine with ranks of a pool."""

    def endpoints(self, fill: Fill) -> Iterable[Endpoint]: ...

    def reserve(self, ticket: Ticket, fill: Fill, changed: Callable[[], None]) -> Share:
        """`ticket` has the endpoints of this host alone; `changed` is called whenever the share
        has become expected, ready or failed, never from within this call."""
        ...


@dataclass(frozen=True, slots=True)
class Receiving:
    """What reservations of a pool share."""

    hosts: Sequence[Host]
    lease_s: float


class Reservation:
    """One ticket. `changed` is called when one of the properties may have changed."""

    def __init__(
        self, node: Receiving, reserved: Reserved, generation: int, changed: Callable[[], None]
    ) -> None:
        ticket_id = new_ticket_id()
        parts = [
            Ticket(ticket_id, generation, node.lease_s, tuple(host.endpoints(reserved.fill)))
            for host in node.hosts
        ]
        ends = tuple(endpoint for part in parts for endpoint in part.endpoints)
        self.ticket = Ticket(ticket_id, generation, node.lease_s, ends)
        self._shares = [
            host.reserve(part, reserved.fill, changed)
            for host, part in zip(node.hosts, parts, strict=True)
        ]

    @property
    def expected(self) -> bool:
        return all(share.expected for share in self._shares)

    @property
    def ready(self) -> bool:
        return all(share.ready for share in self._shares)

    @property
    def failure(self) -> Failure | None:
        return next((share.failure for share in self._shares if share.failure is not None), None)

    def take(self) -> Transfer:
        """The blocks are verified: from now on they are the rank's alone."""
        taken = [share.take() for share in self._shares]
        return Transfer(
            computed_tokens=max(one.computed_tokens for one in taken),
            seconds=max(one.seconds for one in taken),
            bytes=sum(one.bytes for one in taken),
        )

    def end(self, then: Callable[[], None]) -> None:
        """Nobody wants the transfer any more; `then` is called when nothing writes into its blocks
        on any host."""
        left = len(self._shares)

        def one_less() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        for share in self._shares:
            share.end(one_less)


@dataclass(frozen=True, slots=True)
class OwnHost:
    """This process receives into memory that it shares. `model` is a `ticket.model_digest`."""

    memory: PoolMemory
    landing: Landing
    model: bytes
    clock: Callable[[], float]

    def endpoints(self, fill: Fill) -> Iterable[Endpoint]:
        return endpoints(self.memory.geometries, self.landing.address, fill)

    def reserve(self, ticket: Ticket, fill: Fill, changed: Callable[[], None]) -> OwnShare:
        return OwnShare(self, ticket, fill, changed)


class OwnShare:
    """See `Share`."""

    def __init__(
        self, host: OwnHost, ticket: Ticket, fill: Fill, changed: Callable[[], None]
    ) -> None:
        self.expected = True
        self._host = host
        self._changed = changed
        self._incoming = Incoming(ticket, host.model, now=host.clock())
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(ticket.lease_s, self._check_lease)
        if not ticket.empty:
            places = {
                key: host.memory.block(key.rank, key.group, fill[key.group][key.block])
                for endpoint in ticket.endpoints
                for key in endpoint.pieces()
            }
            host.landing.expect(
                Arrival(incoming=self._incoming, places=places, changed=self._settled)
            )

    @property
    def ready(self) -> bool:
        return self._incoming.phase is Phase.READY

    @property
    def failure(self) -> Failure | None:
        return self._incoming.failure

    @property
    def transfer(self) -> Transfer:
        """What has come."""
        return Transfer(
            computed_tokens=self._incoming.computed_tokens,
            seconds=self._incoming.transfer_s,
            bytes=self._incoming.received_bytes,
        )

    def take(self) -> Transfer:
        self._incoming.take()
        self._timer.cancel()
        return self.transfer

    def end(self, then: Callable[[], None]) -> None:
        self._timer.cancel()
        self._incoming.fail(Failure.ABORTED)
        self._host.landing.withdraw(self._incoming)
        then()

    def _settled(self) -> None:
        if self.failure is not None:
            self._timer.cancel()
        self._changed()

    def _check_lease(self) -> None:
        """Renewals move the end of the lease; the timer only looks when it could have come."""
        now = self._host.clock()
        if self._incoming.tick(now):
            self._host.landing.withdraw(self._incoming)
            self._settled()
        elif not self._incoming.over:
            self._timer = self._loop.call_later(
                max(0.0, self._incoming.expires_at - now), self._check_lease
            )
