"""The way out of Python Workers' processes: a Unix socket for each, served by the host.

What comes in there is passed on to the edge, the store, another Worker or the internet. By the
socket the host knows who asks, and adds the token: the Worker's code has neither network nor token.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from multidict import CIMultiDict
from yarl import URL

from edge.workers.runtime import NAMESPACE_HEADER, TOKEN_HEADER, Seat

_log = logging.getLogger("skerry.workers")

TO_HEADER = "x-skerry-to"
REFUSED_HEADER = "x-skerry-refused"
CONNECT_S = 10.0
BACKLOG = 64
EDGE_PATHS = "/client/v4/"
"""What a Worker may ask of its edge: the interface that the AI binding speaks."""
Reach = Literal["public", "any", "none"]
_HOP = frozenset({
    "connection", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "te",
    "trailer", "transfer-encoding", "upgrade", TO_HEADER, TOKEN_HEADER, NAMESPACE_HEADER,
})  # fmt: skip
_BODY = frozenset({"accept-encoding", "content-encoding", "content-length"})
"""What is about a body in the form that it travelled in: it is unpacked here."""


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Refused(Exception):
    """Not passed on; the message is for the Worker's author."""


class PublicOnly(AbstractResolver):
    """Names that lead to an address of the public internet; others are as if unknown."""

    def __init__(self) -> None:
        self._inner = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        public = [one for one in found if is_public(one["host"])]
        if not public:
            raise OSError(f"{host} is no address of the public internet (workers.fetch)")
        return public

    async def close(self) -> None:
        await self._inner.close()


def is_public(address: str) -> bool:
    """Also of an IPv4 address in IPv6's clothes, whichever way it wears them."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inside = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inside = ipaddress.IPv4Address(found.packed[-4:])
        found = inside or found
    return found.is_global and not found.is_multicast


class Egress:
    """`open` and `close` a Worker's way out. Cancelled requests are cancelled on the other side."""

    def __init__(self, runner: web.ServerRunner, near: aiohttp.ClientSession) -> None:
        self._runner = runner
        self._near = near
        self._internet: dict[Reach, aiohttp.ClientSession] = {}
        self._seats: dict[str, tuple[Seat, web.SockSite]] = {}

    async def open(self, path: Path, seat: Seat) -> None:
        """Serve `seat` at `path` from now on."""
        await self.close(path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(BACKLOG)
        site = web.SockSite(self._runner, listener)
        self._seats[str(path)] = seat, site
        await site.start()

    async def close(self, path: Path) -> None:
        """Idempotent."""
        _, site = self._seats.pop(str(path), (None, None))
        if site is not None:
            await site.stop()

    async def end(self) -> None:
        for session in self._internet.values():
            await session.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None, "it was just read"
        found = self._seats.get(request.transport.get_extra_info("sockname"))
        if found is None:
            return _refusal("the Worker has ended")
        try:
            return await self._pass(request, found[0])
        except Refused as refused:
            return _refusal(str(refused))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = str(error) or type(error).__name__
            return _refusal(f"{request.method} {_shown(request)}: {why}")

    async def _pass(self, request: web.BaseRequest, seat: Seat) -> web.StreamResponse:
        kind, _, binding = request.headers.get(TO_HEADER, "").partition(":")
        headers = CIMultiDict(
            (k, v) for k, v in request.headers.items() if k.lower() not in _HOP | _BODY
        )
        url = URL(request.raw_path, encoded=True)
        if kind == "internet":
            return await self._sent(self._outward(url, seat.limits.fetch), request, url, headers)
        headers[TOKEN_HEADER] = seat.token
        if kind == "edge" and url.raw_path.startswith(EDGE_PATHS):
            url = URL(f"http://{seat.edge}{url.raw_path_qs}", encoded=True)
            return await self._sent(self._near, request, url, headers)
        if kind == "store":
            headers[NAMESPACE_HEADER] = binding
            return await self._through(seat.store, request, url, headers)
        if kind == "worker" and binding in seat.services:
            del headers[TOKEN_HEADER]
            headers["host"] = url.raw_authority
            return await self._through(seat.services[binding], request, url, headers)
        raise Refused(f"{kind}:{binding} leads nowhere")

    def _outward(self, url: URL, reach: Reach) -> aiohttp.ClientSession:
        """Raises Refused."""
        if reach == "none":
            raise Refused("Workers of this world fetch nothing (workers.fetch is none)")
        if reach == "public" and not _may_be_public(url.host or ""):
            raise Refused(f"{url.host} is no address of the public internet (workers.fetch)")
        if reach not in self._internet:
            resolver = PublicOnly() if reach == "public" else None
            connector = aiohttp.TCPConnector(resolver=resolver, force_close=True)
            self._internet[reach] = _session(connector)
        return self._internet[reach]

    async def _through(
        self, path: Path, request: web.BaseRequest, url: URL, headers: CIMultiDict[str]
    ) -> web.StreamResponse:
        async with _session(aiohttp.UnixConnector(str(path), force_close=True)) as session:
            return await self._sent(session, request, url, headers)

    async def _sent(
        self,
        session: aiohttp.ClientSession,
        request: web.BaseRequest,
        url: URL,
        headers: CIMultiDict[str],
    ) -> web.StreamResponse:
        body = request.content if request.body_exists else None
        length = request.headers.get("content-length")
        if body is not None and length is not None:
            headers["content-length"] = length
        async with session.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as answer:
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            for name, value in answer.headers.items():
                if name.lower() not in _HOP | _BODY | {REFUSED_HEADER}:
                    response.headers.add(name, value)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


@asynccontextmanager
async def open_egress() -> AsyncIterator[Egress]:
    async with _session(aiohttp.TCPConnector(limit=0)) as near:
        egress: Egress

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await egress.handle(request)

        runner = web.ServerRunner(web.Server(handle, access_log=None, handler_cancellation=True))
        egress = Egress(runner, near)
        await runner.setup()
        try:
            yield egress
        finally:
            await runner.cleanup()
            await egress.end()


def _session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()
    )


def _may_be_public(host: str) -> bool:
    """Names are looked at once they are resolved."""
    try:
        return is_public(host)
    except ValueError:
        return True


def _refusal(why: str) -> web.Response:
    return web.Response(status=502, text=why, headers={REFUSED_HEADER: "1"})


def _shown(request: web.BaseRequest) -> str:
    """Without what may be private in a query."""
    return request.raw_path.partition("?")[0][:200]
