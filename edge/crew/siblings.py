"""The other workers of an edge, asked over their Unix sockets behind the region's secret.

A sibling that does not answer is being started again, or busy: its part of a page is missing then.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp

from core.headers import SECRET_HEADER
from edge.crew.seat import Seat

PATIENCE_S = 2.0


class Siblings(Protocol):
    async def ask(self, path: str) -> dict[int, bytes]:
        """The bodies of `path` by worker number; only of those who answered with 200."""
        ...

    async def tell(self, path: str, body: bytes) -> None:
        """Post `body` to all who are there."""
        ...


class NoSiblings:
    """Of an edge of one process."""

    async def ask(self, path: str) -> dict[int, bytes]:
        return {}

    async def tell(self, path: str, body: bytes) -> None:
        return None


class SocketSiblings:
    def __init__(self, seat: Seat, secret: bytes) -> None:
        self._sockets = {
            number: str(seat.socket(number))
            for number in range(1, seat.of + 1)
            if number != seat.number
        }
        self._headers = {SECRET_HEADER: secret.decode()}

    async def ask(self, path: str) -> dict[int, bytes]:
        bodies = await asyncio.gather(*(self._one(path, where) for where in self._sockets.values()))
        return {
            number: body
            for number, body in zip(self._sockets, bodies, strict=True)
            if body is not None
        }

    async def tell(self, path: str, body: bytes) -> None:
        await asyncio.gather(*(self._one(path, where, body) for where in self._sockets.values()))

    async def _one(self, path: str, where: str, body: bytes | None = None) -> bytes | None:
        method = "GET" if body is None else "POST"
        url = f"http://sibling{path}"
        try:
            async with (
                asyncio.timeout(PATIENCE_S),
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(where)) as session,
                session.request(method, url, headers=self._headers, data=body) as answer,
            ):
                return await answer.read() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
