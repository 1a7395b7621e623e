"""One generation request as an ASGI app, from the first byte of its body to the last of its answer.

Whoever leaves is noticed while the answer is awaited, streamed or not, and the generation is
closed at once. A stream's headers go out with the first delta, so that everything known before is
a real status; after `heartbeat_s` of silence they go out anyway, with SSE comments between events
for as long as the silence lasts, because proxies cut quiet connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass

from litestar.types import Receive, Scope, Send

from core.errors import BodyTooLarge, Cancelled, InternalError, RequestError
from core.events import Done
from core.metrics import EdgeMetrics
from core.types import RequestId
from edge.admission import Admission
from edge.api.body import drain_body, read_body
from edge.api.openai import Parsed
from edge.api.openai_render import END, Renderer, error_body, error_event
from edge.api.record import Record
from edge.api.wire import Wire
from edge.gateway import Gateway

_log = logging.getLogger("skerry.exchange")
_MAX_AFFINITY = 256


@dataclass(frozen=True, slots=True)
class Dialect:
    """A way to ask for a generation. `name` is a metric label."""

    name: str
    parse: Callable[[bytes, RequestId], Parsed]
    renderer: Callable[[Parsed], Renderer]


@dataclass(frozen=True, slots=True)
class Desk:
    """What every exchange of an edge shares."""

    edge: str
    gateway: Gateway
    admission: Admission
    metrics: EdgeMetrics
    body_limit: int
    expose_nodes: bool
    heartbeat_s: float


class Exchange:
    def __init__(self, desk: Desk, dialect: Dialect) -> None:
        self._desk = desk
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = Wire(send)
        record = Record(self._desk.edge, self._dialect.name)
        headers = dict(scope["headers"])
        outcome = "ok"
        try:
            raw = await read_body(receive, headers, self._desk.body_limit)
            parsed = self._dialect.parse(raw, record.request_id)
            record.request = parsed.request
            affinity = _affinity(headers) or parsed.affinity
            with self._desk.admission.permit():
                await _until_gone(receive, self._answer(parsed, affinity, wire, record))
        except Cancelled as error:
            outcome = error.code  # nobody is there to be told
        except RequestError as error:
            outcome = error.code
            await self._refuse(error, wire, record)
            if isinstance(error, BodyTooLarge) and b"expect" not in headers:
                await drain_body(receive)
            await wire.end()
        except asyncio.CancelledError:
            outcome = Cancelled.code
            raise
        except Exception as error:  # noqa: BLE001 - the last boundary: a bug answers in our form
            outcome = InternalError.code
            _log.exception("bug id=%s kind=%s", record.request_id, type(error).__name__)
            await self._refuse(InternalError("the edge failed"), wire, record)
            await wire.end()
        finally:
            record.close(outcome, self._desk.metrics)

    async def _answer(
        self, parsed: Parsed, affinity: str | None, wire: Wire, record: Record
    ) -> None:
        if parsed.stream:
            await self._stream(parsed, affinity, wire, record)
        else:
            await self._whole(parsed, affinity, wire, record)

    async def _stream(
        self, parsed: Parsed, affinity: str | None, wire: Wire, record: Record
    ) -> None:
        renderer = self._dialect.renderer(parsed)
        head = self._stream_head(record)
        beat = asyncio.create_task(self._heartbeat(wire, head))
        try:
            generation = self._desk.gateway.generate(parsed.request, affinity=affinity)
            async with aclosing(generation) as batches:
                async for batch in batches:
                    record.see(batch)
                    data = renderer.stream(batch.events)
                    last = isinstance(batch.events[-1], Done)
                    if last and self._desk.expose_nodes:
                        data += b": skerry " + record.trace() + b"\n\n"
                    await wire.event(head, data + END if last else data)
        finally:
            beat.cancel()
            await asyncio.wait({beat})
        await wire.end()

    def _stream_head(self, record: Record) -> Callable[[], list[tuple[bytes, bytes]]]:
        def head() -> list[tuple[bytes, bytes]]:
            return [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *record.headers(expose_nodes=self._desk.expose_nodes),
            ]

        return head

    async def _heartbeat(self, wire: Wire, head: Callable[[], list[tuple[bytes, bytes]]]) -> None:
        while True:
            quiet_s = wire.quiet_s()
            if quiet_s >= self._desk.heartbeat_s:
                await wire.event(head, b": waiting\n\n")
                quiet_s = 0.0
            await asyncio.sleep(self._desk.heartbeat_s - quiet_s)

    async def _whole(
        self, parsed: Parsed, affinity: str | None, wire: Wire, record: Record
    ) -> None:
        renderer = self._dialect.renderer(parsed)
        generation = self._desk.gateway.generate(parsed.request, affinity=affinity)
        async with aclosing(generation) as batches:
            async for batch in batches:
                record.see(batch)
                renderer.take(batch.events)
        assert record.done is not None, "a generation that ends without error ends in Done"
        headers = record.headers(expose_nodes=self._desk.expose_nodes)
        if self._desk.expose_nodes:
            headers.append((b"x-skerry-trace", record.trace()))
        await wire.whole(200, renderer.whole(record.done.usage), headers)
        await wire.end()

    async def _refuse(self, error: RequestError, wire: Wire, record: Record) -> None:
        if wire.started:
            await wire.event(None, error_event(error))
            return
        headers = record.headers(expose_nodes=self._desk.expose_nodes)
        await wire.whole(error.http_status, error_body(error), [*headers, *refusal_headers(error)])


def refusal_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Retry-After in whole seconds, at least one; a caller over the limit is not kept."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        seconds = max(1, -int(-error.retry_after_s // 1))
        headers.append((b"retry-after", str(seconds).encode()))
    if isinstance(error, BodyTooLarge):
        headers.append((b"connection", b"close"))
    return headers


def _affinity(headers: dict[bytes, bytes]) -> str | None:
    value = headers.get(b"x-session-affinity", b"").decode("latin-1")
    return value[:_MAX_AFFINITY] or None


async def _until_gone(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Run `work`, or cancel it and raise Cancelled when the caller leaves first."""
    worker = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({worker, listener}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        left = not worker.done()
        worker.cancel()
        listener.cancel()
        await asyncio.wait({worker, listener})
    if left:
        raise Cancelled("the caller left")
    worker.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
