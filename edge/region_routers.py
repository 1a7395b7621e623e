"""A region with several routers, seen as one: any of them answers for all of its nodes.

Requests go to the routers in turn, past those that are known to be away. One that fails before the
answer's first piece is asked again at another router; the region counts as lost when none is left.
What the routers say is put together: each sees the work of all, but only its own queue.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from msgspec.structs import replace

from core.errors import Draining, IncompleteStream, RegionUnavailable, RequestError
from core.events import Accepted, Delta, Event, Fault, Moved
from core.prefix import ID_BYTES
from core.status import PromptTokens, RegionMore, RegionPrefixes, RegionStatus, Told
from core.types import GenerateRequest, RequestId
from edge.region_client import RegionClient

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Back-off between attempts to hear a router again."""


@dataclass(slots=True)
class _Seat:
    """One router. `status` while its stream stands; `down` from its end to the next frame."""

    client: RegionClient
    status: RegionStatus | None = None
    down: RequestError | None = None
    hot: dict[bytes, float] = field(default_factory=dict)
    total: float = 0.0


class ManyRouters:
    """See `edge.region_client.RegionClient`."""

    def __init__(self, clients: Sequence[RegionClient]) -> None:
        self._seats = [_Seat(client) for client in clients]
        self._turns = itertools.count()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[Event], None]:
        accepted = False
        left = self._order()
        while left:
            seat = left.pop(0)
            try:
                async with aclosing(seat.client.generate(request)) as batches:
                    async for events in batches:
                        if left and any(map(_drains, events)):
                            raise Draining("this router stops")
                        told = [_again(one) for one in events] if accepted else events
                        accepted = accepted or any(isinstance(one, Accepted) for one in events)
                        if any(isinstance(one, Delta) for one in events):
                            left = []  # the client has seen something: nothing moves any more
                        yield told
                    return
            except (RegionUnavailable, IncompleteStream, Draining):
                if not left:
                    raise

    async def cancel(self, request_id: RequestId) -> None:
        await asyncio.gather(*(seat.client.cancel(request_id) for seat in self._seats))

    async def ping(self) -> float:
        return await self._order()[0].client.ping()

    async def statuses(self) -> AsyncGenerator[Told, None]:
        news: asyncio.Queue[Told | None] = asyncio.Queue()
        epoch, sequence = secrets.token_hex(8), itertools.count(1)
        for seat in self._seats:
            seat.status = seat.down = None
        readers = [
            asyncio.create_task(self._follow(number, seat, news))
            for number, seat in enumerate(self._seats)
        ]
        try:
            while True:
                told = await news.get()
                up = [seat.status for seat in self._seats if seat.status is not None]
                if isinstance(told, RegionPrefixes):
                    yield told
                elif up:
                    yield replace(together(up), epoch=epoch, sequence=next(sequence))
                elif all(seat.down is not None for seat in self._seats):
                    raise RegionUnavailable("none of its routers is heard")
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _follow(self, number: int, seat: _Seat, news: asyncio.Queue[Told | None]) -> None:
        """Hear one router for as long as anybody asks."""
        pause = FIRST_PAUSE_S
        while True:
            try:
                async with aclosing(seat.client.statuses()) as frames:
                    async for told in frames:
                        pause = FIRST_PAUSE_S
                        if isinstance(told, RegionStatus):
                            seat.status, seat.down = told, None
                            news.put_nowait(told)
                        else:
                            news.put_nowait(self._prefixes(number, seat, told))
                seat.down = IncompleteStream("its status stream ended")
            except RequestError as error:
                seat.down = error
            seat.status = None
            news.put_nowait(None)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _prefixes(self, number: int, seat: _Seat, told: RegionPrefixes) -> RegionPrefixes:
        named = replace(told, router=number)
        if not told.total:
            return named
        ids = (told.hot[at : at + ID_BYTES] for at in range(0, len(told.hot), ID_BYTES))
        seat.hot, seat.total = dict(zip(ids, told.counts, strict=False)), told.total
        counts: dict[bytes, float] = {}
        for other in self._seats:
            for one, count in other.hot.items():
                counts[one] = counts.get(one, 0.0) + count
        return replace(
            named,
            hot=b"".join(counts),
            counts=tuple(counts.values()),
            total=sum(other.total for other in self._seats),
        )

    def _order(self) -> list[_Seat]:
        """All of them, the next in turn first, those that are not heard last."""
        turn = next(self._turns) % len(self._seats)
        seats = [*self._seats[turn:], *self._seats[:turn]]
        seats.sort(key=lambda seat: (seat.down is not None, _draining(seat)))
        return seats


def together(statuses: Sequence[RegionStatus]) -> RegionStatus:
    """What the routers of one region say, as one. Nodes, models and the work on them are the same
    to all; the newest to have come in of the others' work differs by a heartbeat at most."""
    first = max(statuses, key=lambda one: sum(node.alive for node in one.nodes))
    return replace(
        first,
        queue_s=sum(one.queue_s for one in statuses),
        queued=sum(one.queued for one in statuses),
        active=sum(one.active for one in statuses),
        draining=all(one.draining for one in statuses),
        more=RegionMore(
            prompts=PromptTokens(
                **{
                    name: sum(getattr(one.more.prompts, name) for one in statuses)
                    for name in PromptTokens.__struct_fields__
                }
            ),
            weight=max(one.more.weight for one in statuses),
        ),
    )


def _draining(seat: _Seat) -> bool:
    return seat.status is not None and seat.status.draining


def _drains(event: Event) -> bool:
    return isinstance(event, Fault) and event.code == Draining.code


def _again(event: Event) -> Event:
    """The same request was accepted by another router before."""
    if isinstance(event, Accepted):
        return Moved(
            prefill=event.prefill,
            decode=event.decode,
            reason=event.reason,
            placing=event.placing,
        )
    return event
