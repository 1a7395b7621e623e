"""One transfer to several data sockets: the ranks of the receiver are on more than one host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from core.errors import TransferFailed
from core.kv.ticket import Ticket
from core.kv.transports.base import Carrier, Piece, Shipment


class FanCarrier:
    """Opens a shipment of `inner` to each data socket that a ticket names."""

    def __init__(self, inner: Carrier) -> None:
        self._inner = inner

    async def open(
        self, ticket: Ticket, model: bytes, failed: Callable[[TransferFailed], None]
    ) -> Shipment:
        parts = by_address(ticket)
        if len(parts) == 1:
            return await self._inner.open(next(iter(parts.values())), model, failed)
        told = _Once(failed)
        opening = [
            asyncio.ensure_future(self._inner.open(part, model, told)) for part in parts.values()
        ]
        try:
            shipments = await asyncio.gather(*opening)
        except BaseException:  # a refusal, or our own cancellation: those that are open close again
            for one in opening:
                one.cancel()
            await _to_its_end(_let_go(opening))
            raise
        return FanShipment(
            {
                endpoint.rank: shipment
                for part, shipment in zip(parts.values(), shipments, strict=True)
                for endpoint in part.endpoints
            }
        )


class FanShipment:
    """See `base.Shipment`. Done when every socket's receiver has verified its part."""

    def __init__(self, by_rank: Mapping[int, Shipment]) -> None:
        self._by_rank = by_rank
        self._all = tuple(dict.fromkeys(by_rank.values()))

    async def send(self, pieces: Sequence[Piece]) -> None:
        shares: dict[Shipment, list[Piece]] = {}
        for piece in pieces:
            shares.setdefault(self._by_rank[piece.key.rank], []).append(piece)
        await _all(shipment.send(share) for shipment, share in shares.items())

    async def renew(self) -> None:
        await _all(shipment.renew() for shipment in self._all)

    async def finish(self, computed_tokens: int) -> None:
        await _all(shipment.finish(computed_tokens) for shipment in self._all)

    async def close(self) -> None:
        await _to_its_end(_all(shipment.close() for shipment in self._all))


def by_address(ticket: Ticket) -> dict[str, Ticket]:
    """The part of a ticket that each data socket serves. A pool's first endpoint is on the first
    host of its node. Raises TransferFailed when there is none."""
    addresses = dict.fromkeys(endpoint.address for endpoint in ticket.endpoints)
    if not addresses:
        raise TransferFailed("a ticket without data sockets cannot be served")
    named = next(iter(addresses)).rpartition(":")[0].strip("[]") if len(addresses) > 1 else ""
    return {
        address: replace(
            ticket,
            endpoints=tuple(one for one in ticket.endpoints if one.address == address),
            named=named,
        )
        for address in addresses
    }


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All side by side; the first error once all have ended."""
    outcomes = await asyncio.gather(*works, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


async def _let_go(opening: Sequence[asyncio.Future[Shipment]]) -> None:
    """Close what has been opened."""
    opened = await asyncio.gather(*opening, return_exceptions=True)
    await _all(one.close() for one in opened if not isinstance(one, BaseException))


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """A cancellation meanwhile, a second one too, waits: a socket that nobody else knows of is
    closed before."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()


class _Once:
    """Calls at most once."""

    def __init__(self, failed: Callable[[TransferFailed], None]) -> None:
        self._failed: Callable[[TransferFailed], None] | None = failed

    def __call__(self, error: TransferFailed) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            failed(error)
