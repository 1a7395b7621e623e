"""How an edge speaks to a region: the seam, and its form over HTTP.

Wire (see `regional`): `POST /internal/v1/generate` answers with event frames, `GET
/internal/v1/status` with status frames, `POST /internal/v1/cancel/{id}` is idempotent. Each
message carries the region secret and the wire version. Generations go over `region_stream`, all the
rest over aiohttp, whose errors become ours here and nowhere else: not reached → RegionUnavailable,
cut → IncompleteStream, other version → VersionSkew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

import aiohttp
import msgspec

from core.errors import (
    DeadlineExceeded,
    IncompleteStream,
    RegionUnavailable,
    RequestError,
    VersionSkew,
)
from core.events import Event, event_decoder
from core.headers import SECRET_HEADER, WIRE_HEADER
from core.naps import Nap
from core.status import Told, status_decoder
from core.tls import Credentials
from core.types import WIRE_VERSION, GenerateRequest, RegionName, RequestId
from edge.region_stream import CONNECT_S, Streams

_log = logging.getLogger("skerry.region_client")

CANCEL_S = 1.0
PING_S = 2.0
SILENCE_S = 5.0
"""A region that sends neither status nor events for this long is lost: status comes each second."""
_LOOK_S = 1.0
"""How often a quiet wait asks whether the region is still there."""
_FRAMES = "application/x-skerry-frames"
_WIRE = str(WIRE_VERSION)
_encode = msgspec.msgpack.Encoder().encode


class RegionClient(Protocol):
    """One region. Generators are closed by whoever reads them (`aclosing`). Every method raises
    errors of `core.errors` only."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[list[Event], None]:
        """The events of one generation, all that one read brought as one list. The end of the
        generator is the end of the region's answer, not a promise that `Done` came.

        Raises DeadlineExceeded when the request's time is over. Closed early, it leaves the answer
        to end by itself for a second: whoever closes it cancels the request, and the connection
        stays warm."""
        ...

    async def cancel(self, request_id: RequestId) -> None:
        """Tell the region to drop a request; never raises, takes at most a second."""
        ...

    def statuses(self) -> AsyncGenerator[Told, None]:
        """Status and prefix frames as they come."""
        ...

    async def ping(self) -> float:
        """Seconds of one exchange of no work, the simulated round trip in it."""
        ...


class HttpRegionClient:
    """A region behind HTTP. `session` is shared and closed by the owner.

    `delay_s` is waited before each generation: the simulated round trip of a world on one machine.
    """

    def __init__(
        self,
        name: RegionName,
        address: str,
        session: RegionSession,
        *,
        secret: bytes,
        delay_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._name = name
        self._address = address
        self._base = f"{session.scheme}://{address}/internal/v1"
        self._streams = session.streams
        self._session = session.http
        self._headers = {SECRET_HEADER: secret.decode(), WIRE_HEADER: _WIRE}
        lines = [f"{name}: {value}" for name, value in self._headers.items()]
        self._head = "\r\n".join(
            ["POST /internal/v1/generate HTTP/1.1", f"host: {address}", *lines, "content-length: "]
        ).encode()
        self._delay_s = delay_s
        self._clock = clock
        self._silence_s = silence_s
        self._heard_at: float | None = None  # when the status stream last said anything

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[Event], None]:
        until = self._clock() + request.deadline_s
        if self._delay_s:
            await asyncio.sleep(min(self._delay_s, request.deadline_s))

        def look() -> RequestError | None:
            if self._clock() >= until:
                return DeadlineExceeded("the answer was not complete within its deadline")
            return RegionUnavailable("it went silent") if self._lost() else None

        body = _encode(request)
        decoder = event_decoder()
        try:
            stream, head = await self._streams.open(
                self._address,
                b"%b%d\r\n\r\n%b" % (self._head, len(body), body),
                look=look,
                deadline_s=until - self._clock(),
            )
            try:
                refusal = _refusal(self._name, head.status, head.headers)
                if refusal is not None:
                    raise refusal
                while data := await stream.read():
                    if events := decoder.feed(data):
                        yield events
            finally:
                stream.leave()
        except (RegionUnavailable, IncompleteStream) as error:
            raise type(error)(f"region {self._name}: {error.message}") from error

    async def cancel(self, request_id: RequestId) -> None:
        try:
            async with asyncio.timeout(CANCEL_S):
                url = f"{self._base}/cancel/{request_id}"
                async with self._session.post(url, headers=self._headers):
                    pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # The closed connection says the same; this message is for proxies that hide it.
            _log.info("cancel unheard id=%s region=%s why=%s", request_id, self._name, error)

    async def ping(self) -> float:
        began = self._clock()
        try:
            async with asyncio.timeout(PING_S):
                url = f"{self._base.removesuffix('/internal/v1')}/healthz"
                async with self._session.get(url) as answer:
                    await answer.read()
                    if answer.status != 200:
                        raise RegionUnavailable(f"region {self._name} answered {answer.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RegionUnavailable(f"region {self._name} is not reached: {error}") from error
        return self._clock() - began + self._delay_s

    async def statuses(self) -> AsyncGenerator[Told, None]:
        decoder = status_decoder()
        heard_at = self._clock()

        def silent() -> bool:
            return self._silent_since(heard_at)

        answer = await self._open(silent)
        try:
            while data := await self._read(answer, silent):
                heard_at = self._heard_at = self._clock()
                for told in decoder.feed(data):
                    yield told
        finally:
            answer.close()

    async def _open(self, lost: Callable[[], bool]) -> aiohttp.ClientResponse:
        request = asyncio.ensure_future(self._request())
        try:
            while not request.done():
                look = Nap(_LOOK_S)
                await asyncio.wait({request}, timeout=look.seconds)
                if not request.done() and not look.overslept and lost():
                    raise RegionUnavailable(f"region {self._name} does not answer")
            answer = request.result()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RegionUnavailable(f"region {self._name} is not reached: {error}") from error
        finally:
            request.cancel()
        refusal = _refusal(self._name, answer.status, answer.headers)
        if refusal is not None:
            answer.close()
            raise refusal
        return answer

    async def _request(self) -> aiohttp.ClientResponse:
        return await self._session.get(f"{self._base}/status", headers=self._headers)

    async def _read(self, answer: aiohttp.ClientResponse, lost: Callable[[], bool]) -> bytes:
        """What has come, at least one byte; b"" at the end."""
        while True:
            look = Nap(_LOOK_S)
            try:
                async with asyncio.timeout(look.seconds):
                    return await answer.content.readany()
            except TimeoutError as error:
                if not look.overslept and lost():
                    raise RegionUnavailable(f"region {self._name} went silent") from error
            except (aiohttp.ClientError, OSError) as error:
                raise IncompleteStream(f"the stream from region {self._name} was cut") from error

    def _lost(self) -> bool:
        """Whether a quiet generation stands on a region that says nothing at all any more.

        A long prefill is quiet for minutes while status goes on, so status is the sign of life.
        """
        return self._heard_at is not None and self._silent_since(self._heard_at)

    def _silent_since(self, moment: float) -> bool:
        return self._clock() - moment > self._silence_s


def _refusal(name: RegionName, status: int, headers: Mapping[str, str]) -> RequestError | None:
    if status == 403:
        return RegionUnavailable(f"region {name} refuses this edge's secret")
    if status != 200:
        return RegionUnavailable(f"region {name} answered {status}")
    wire, kind = headers.get(WIRE_HEADER), headers.get("content-type")
    if wire != _WIRE or kind != _FRAMES:
        return VersionSkew(f"region {name} speaks wire {wire}, {kind}; not {_WIRE}")
    return None


class RegionSession:
    """The connections to all regions: `streams` for generations, `http` for all the rest."""

    def __init__(self, credentials: Credentials | None = None) -> None:
        """With `credentials` all of them are TLS, and both sides show their certificates."""
        self.scheme = "http" if credentials is None else "https"
        tls = None if credentials is None else credentials.client
        self.streams = Streams(tls)
        # No limit on connections (admission limits), none on duration (deadlines limit).
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0, ssl=tls or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self.streams.close()
        await self.http.close()


@asynccontextmanager
async def new_session(credentials: Credentials | None = None) -> AsyncIterator[RegionSession]:
    session = RegionSession(credentials)
    try:
        yield session
    finally:
        await session.close()
