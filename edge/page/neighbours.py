"""The other edges of the world, asked for their state while somebody looks at the page."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import aiohttp
import msgspec

from core.address import split_address
from core.config import Edge
from core.pins import Pins
from edge.page.world import EdgeCard

KEPT_S = 1.0
"""Several viewers share one answer."""
TIMEOUT = aiohttp.ClientTimeout(total=0.8)


class _Region(msgspec.Struct, frozen=True):
    name: str
    round_trip_ms: float


class _Status(msgspec.Struct, frozen=True):
    """What is read of an edge's `/status`."""

    edge: str
    in_flight: int
    held: int
    draining: bool
    regions: list[_Region]


_NOBODY: Mapping[str, Pins] = MappingProxyType({})


class Neighbours:
    """Edges that listen on an address that can be dialled are asked; the others stay unknown.
    `pins`: of those that speak https."""

    def __init__(
        self,
        others: Sequence[Edge],
        session: aiohttp.ClientSession,
        *,
        pins: Mapping[str, Pins] = _NOBODY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._others = others
        self._session = session
        self._pins = pins
        self._clock = clock
        self._asking = asyncio.Lock()
        self._cards: list[EdgeCard] = []
        self._asked_at = float("-inf")

    async def cards(self) -> list[EdgeCard]:
        async with self._asking:
            if self._clock() - self._asked_at > KEPT_S:
                self._cards = list(await asyncio.gather(*map(self._ask, self._others)))
                self._asked_at = self._clock()
            return self._cards

    def _trust(self, edge: Edge) -> ssl.SSLContext | bool:
        pins = self._pins.get(edge.name)
        if pins is None:
            return True
        pins.look()
        return pins.context

    async def _ask(self, edge: Edge) -> EdgeCard:
        url = address_of(edge)
        if url is None:
            return _card(edge, "unknown")
        try:
            tls = self._trust(edge)
            async with self._session.get(f"{url}/status", timeout=TIMEOUT, ssl=tls) as answer:
                told = msgspec.json.decode(await answer.read(), type=_Status)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
            return _card(edge, "down", url)
        if told.edge != edge.name:
            return _card(edge, "down", url)  # somebody else has that address
        return EdgeCard(
            name=edge.name,
            place=edge.place,
            here=False,
            state="suspect" if told.draining else "up",
            url=url,
            in_flight=told.in_flight,
            held=told.held,
            round_trip_ms={one.name: one.round_trip_ms for one in told.regions},
        )


def address_of(edge: Edge) -> str | None:
    """Where an edge can be asked: not where it listens on all addresses of another machine."""
    host, port = split_address(edge.listen)
    return None if port == 0 or host in ("0.0.0.0", "::") else edge.url


def _card(edge: Edge, state: str, url: str = "") -> EdgeCard:
    return EdgeCard(
        name=edge.name,
        place=edge.place,
        here=False,
        state=state,
        url=url,
        round_trip_ms=dict(edge.round_trip_ms),
    )
