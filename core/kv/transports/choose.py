"""Which way a transfer goes: what the receiver offers, in the order that the sender prefers.

Sender and receiver each list the ways that their topology allows. A ticket without offers comes
from a release that knows TCP alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from core.errors import TransferFailed
from core.kv.handoff import Incoming
from core.kv.ticket import Endpoint, Offer, Ticket
from core.kv.transports.base import TCP, TCP_TLS, Arrival, Carrier, Landing, Shipment

log = logging.getLogger("skerry.kv")


def ways(endpoint: Endpoint, kinds: Iterable[str], host: str) -> list[Offer]:
    """The offers of an endpoint that a sender on `host` can take, in the order of its `kinds`."""
    offers = endpoint.offers or (Offer(TCP, endpoint.address),)
    return [
        offer
        for kind in kinds
        for offer in offers
        if offer.kind == kind and offer.host in ("", host)
    ]


class ChoosingCarrier:
    """Opens a shipment by the best common way; by the next one where that does not come about.

    `carriers`: by kind of offer, in order of preference. All endpoints of a ticket must have the
    same offers: `fan` sees to that.
    """

    def __init__(self, carriers: Mapping[str, Carrier], host: str) -> None:
        self._carriers = carriers
        self._host = host

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> Shipment:
        if not ticket.endpoints:
            raise TransferFailed("a ticket without data sockets cannot be served")
        found = ways(ticket.endpoints[0], self._carriers, self._host)
        if not found:
            offered = ", ".join(sorted({one.kind for one in ticket.endpoints[0].offers})) or TCP
            raise TransferFailed(
                f"the receiver takes {offered}; this node sends by {', '.join(self._carriers)}"
            )
        *others, last = found
        for offer in others:
            try:
                return await self._open(offer, ticket, model, failed)
            except TransferFailed as error:
                log.info("a hand-off goes another way than %s: %s", offer.kind, error)
        return await self._open(last, ticket, model, failed)

    async def _open(
        self, offer: Offer, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> Shipment:
        there = tuple(replace(one, address=offer.address) for one in ticket.endpoints)
        carrier = self._carriers[offer.kind]
        log.debug("a hand-off goes by %s", offer.kind)
        return await carrier.open(replace(ticket, endpoints=there), model, failed)


class Landings:
    """Several landings that share what they await, as one. See `base.Landing`."""

    def __init__(self, all_: Sequence[Landing]) -> None:
        self._all = tuple(all_)

    @property
    def address(self) -> str:
        """Of the data socket where there is one: senders that know no offers dial it."""
        tcp = [offer for offer in self.offers if offer.kind in (TCP, TCP_TLS)]
        return (tcp or list(self.offers))[0].address

    @property
    def offers(self) -> tuple[Offer, ...]:
        return tuple(offer for one in self._all for offer in one.offers)

    def expect(self, arrival: Arrival) -> None:
        self._all[0].expect(arrival)

    def withdraw(self, incoming: Incoming) -> None:
        for one in self._all:
            one.withdraw(incoming)
