"""A decode node's reservation: blocks set aside, a ticket given, a lease that runs.

Each host that has ranks of the pool receives its own share; the transfer is ready when all shares
are. `end` is the only way out besides `take`, and its order is the safety of the hand-off: the
machine fails first, then the landing stops writing, and only after that may the caller tell the
rank to free the blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.engine.messages import Reserved
from core.kv.handoff import Failure, Incoming, Phase
from core.kv.shards import PoolMemory, endpoints
from core.kv.ticket import Endpoint, Ticket, new_ticket_id
from core.kv.transports.base import Arrival, Landing
from regional.node.answer import Transfer
from regional.node.filling import Filling

BLOCKS_A_TURN = 32
Blocks = Sequence[Sequence[int]]
"""Of each group: blocks of the pool."""
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

    @property
    def transfer(self) -> Transfer:
        """What has come so far."""
        ...

    @property
    def first_missing(self) -> int | None:
        """The prompt's first block that is not verified here in full; None: there is none."""
        ...

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

    async def overwrite(self, blocks: Blocks) -> None:
        """With zeros, in the memory of all ranks there. Nobody uses these blocks meanwhile."""
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

    @property
    def transfer(self) -> Transfer:
        """What has come so far."""
        return _together([share.transfer for share in self._shares])

    @property
    def first_missing(self) -> int | None:
        """The prompt's first block of which something is not verified; None: there is none."""
        missing = (share.first_missing for share in self._shares)
        return min((one for one in missing if one is not None), default=None)

    def take(self) -> Transfer:
        """The blocks are verified: from now on they are the rank's alone."""
        return _together([share.take() for share in self._shares])

    def fill_here(self) -> Filling | None:
        """Let this process fill the blocks instead of a sender; None where other hosts have ranks
        of the pool."""
        only = self._shares[0]
        if len(self._shares) > 1 or not isinstance(only, OwnShare):
            return None
        return only.fill_here()

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


def _together(shares: Sequence[Transfer]) -> Transfer:
    return Transfer(
        computed_tokens=max(one.computed_tokens for one in shares),
        seconds=max(one.seconds for one in shares),
        bytes=sum(one.bytes for one in shares),
    )


@dataclass(frozen=True, slots=True)
class OwnHost:
    """This process receives into memory that it shares. `model` is a `ticket.model_digest`."""

    memory: PoolMemory
    landing: Landing
    model: bytes
    clock: Callable[[], float]

    def endpoints(self, fill: Fill) -> Iterable[Endpoint]:
        return endpoints(self.memory.geometries, self.landing.address, fill, self.landing.offers)

    def reserve(self, ticket: Ticket, fill: Fill, changed: Callable[[], None]) -> OwnShare:
        return OwnShare(self, ticket, fill, changed)

    async def overwrite(self, blocks: Blocks) -> None:
        for some in in_turns(blocks):
            self.blank(some)
            await asyncio.sleep(0)

    def blank(self, blocks: Blocks) -> None:
        """As `overwrite`, at once."""
        for group, some in enumerate(blocks):
            for rank in self.memory.held(group):
                for block in some:
                    view = self.memory.block(rank, group, block)
                    view[:] = bytes(len(view))


def in_turns(blocks: Blocks) -> Iterator[tuple[tuple[int, ...], ...]]:
    """A few at a time, so that others get a turn between them."""
    for start in range(0, max(map(len, blocks), default=0), BLOCKS_A_TURN):
        yield tuple(tuple(some[start : start + BLOCKS_A_TURN]) for some in blocks)


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
        self._places = {
            key: host.memory.block(key.rank, key.group, fill[key.group][key.block])
            for endpoint in ticket.endpoints
            for key in endpoint.pieces()
        }
        if self._places:
            host.landing.expect(
                Arrival(incoming=self._incoming, places=self._places, changed=self._settled)
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

    @property
    def first_missing(self) -> int | None:
        return self._incoming.first_missing

    def take(self) -> Transfer:
        self._incoming.take()
        self._timer.cancel()
        return self.transfer

    def fill_here(self) -> Filling:
        """No sender is awaited any more. Raises TransferFailed when the transfer is over."""
        self._host.landing.withdraw(self._incoming)
        return Filling(self._incoming, self._places, self._host.model, self._host.clock)

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
