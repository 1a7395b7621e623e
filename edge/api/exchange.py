"""One generation request as an ASGI app, from the first byte of its body to the last of its answer.

Whoever leaves is noticed while the answer is awaited, streamed or not, and the generation is
closed at once. A stream's headers go out with the first delta, so that everything known before is
a real status; after `heartbeat_s` of silence they go out anyway, with SSE comments between events
for as long as the silence lasts, because proxies cut quiet connections. A request that waits for a
busy world is told its place in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec
from litestar.types import Receive, Scope, Send

from core.errors import Cancelled, InternalError, RequestError
from core.events import Done
from core.metrics import EdgeMetrics
from core.telemetry import Telemetry, enter
from core.types import RequestId
from edge.admission import Admission
from edge.api.error_form import ErrorForm
from edge.api.openai import Parsed
from edge.api.openai_render import END, Renderer
from edge.api.presence import Heartbeat, while_there
from edge.api.record import Record
from edge.api.upload import CUTS_SHORT, Uploads, drain_body, lingers
from edge.api.wire import Wire
from edge.gateway import Anew, Batch, Gateway
from edge.hold import Held
from edge.journal import Recent
from edge.telemetry import Traced, spans_of
from edge.tenants.budget import Budgets
from edge.tenants.door import Door

_log = logging.getLogger("skerry.exchange")
_MAX_AFFINITY = 256


@dataclass(frozen=True, slots=True)
class Dialect:
    """A way to ask for a generation. `name` is a metric label."""

    name: str
    parse: Callable[[bytes, RequestId], Parsed]
    renderer: Callable[[Parsed], Renderer]
    errors: ErrorForm


@dataclass(frozen=True, slots=True)
class Desk:
    """What every exchange of an edge shares."""

    edge: str
    gateway: Gateway
    admission: Admission
    door: Door
    budgets: Budgets
    metrics: EdgeMetrics
    uploads: Uploads
    expose_nodes: bool
    heartbeat_s: float
    recent: Recent
    telemetry: Telemetry


class Exchange:
    def __init__(self, desk: Desk, dialect: Dialect) -> None:
        self._desk = desk
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = Wire(send)
        record = Record(self._desk.edge, self._dialect.name)
        self._desk.recent.open(record.journal)
        headers = dict(scope["headers"])
        if self._desk.telemetry.on:
            above = headers.get(b"traceparent", b"").decode("latin-1")
            record.journal.traced = Traced(enter(above))
        outcome = "ok"
        try:
            record.caller = caller = self._desk.door.authenticate(headers)
            record.journal.asked_by(caller.name, caller.key_id, caller.worker)
            raw = await self._desk.uploads.read(receive, headers)
            parsed = _obeyed(headers, self._dialect.parse(raw, record.request_id))
            parsed = replace(parsed, request=caller.bind(parsed.request))
            record.request = parsed.request
            affinity = _affinity(headers) or parsed.affinity
            record.tab = self._desk.budgets.tab(
                caller, parsed.request, self._dialect.name, stream=parsed.stream
            )
            with self._desk.admission.permit():
                async with record.tab:
                    record.journal.admitted(parsed.request, stream=parsed.stream)
                    await while_there(receive, wire, self._answer(parsed, affinity, wire, record))
        except Cancelled as error:
            outcome = error.code  # nobody is there to be told
        except RequestError as error:
            outcome = error.code
            await self._refuse(error, wire, record)
            if lingers(error, headers):
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
            traced = record.journal.traced
            if traced is not None and traced.context.sampled:
                story = self._desk.recent.story(record.journal)
                self._desk.telemetry.tell(spans_of(story, traced))

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
        heartbeat = Heartbeat(wire, head, self._desk.heartbeat_s)
        heartbeat.start()
        try:
            async with aclosing(self._generation(parsed, affinity, record)) as batches:
                async for batch in batches:
                    if isinstance(batch, Held):
                        place = f": held, place {batch.position} of {batch.waiting}\n\n"
                        await wire.event(head, place.encode())
                        continue
                    assert isinstance(batch, Batch), "what was shown does not begin anew"
                    record.see(batch)
                    data = renderer.stream(batch.events)
                    last = isinstance(batch.events[-1], Done)
                    if last:
                        told = record.trace() if self._desk.expose_nodes else b""
                        data += (b": skerry " + told + b"\n\n" if told else b"") + END
                    await wire.event(head, data, last=last)
        finally:
            await heartbeat.stop()

    def _generation(
        self, parsed: Parsed, affinity: str | None, record: Record
    ) -> AsyncGenerator[Batch | Held | Anew, None]:
        return self._desk.gateway.generate(
            parsed.request,
            affinity=affinity,
            journal=record.journal,
            unseen=not parsed.stream,
        )

    def _stream_head(self, record: Record) -> Callable[[], list[tuple[bytes, bytes]]]:
        def head() -> list[tuple[bytes, bytes]]:
            return [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *record.headers(expose_nodes=self._desk.expose_nodes),
            ]

        return head

    async def _whole(
        self, parsed: Parsed, affinity: str | None, wire: Wire, record: Record
    ) -> None:
        renderer = self._dialect.renderer(parsed)
        async with aclosing(self._generation(parsed, affinity, record)) as batches:
            async for batch in batches:
                if isinstance(batch, Anew):
                    renderer = self._dialect.renderer(parsed)
                    record.anew()
                elif not isinstance(batch, Held):
                    record.see(batch)
                    renderer.take(batch.events)
        assert record.done is not None, "a generation that ends without error ends in Done"
        headers = record.headers(expose_nodes=self._desk.expose_nodes)
        if self._desk.expose_nodes:
            headers.append((b"x-skerry-trace", record.trace()))
        await wire.whole(200, renderer.whole(record.done.usage), headers)
        await wire.end()

    async def _refuse(self, error: RequestError, wire: Wire, record: Record) -> None:
        form = self._dialect.errors
        if wire.started:
            await wire.event(None, form.event(error))
            return
        headers = record.headers(expose_nodes=self._desk.expose_nodes)
        answer = [*headers, *refusal_headers(error)]
        await wire.whole(form.status(error), form.body(error), answer)


def refusal_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Retry-After in whole seconds, at least one; a caller whose body was left is not kept."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        seconds = max(1, -int(-error.retry_after_s // 1))
        headers.append((b"retry-after", str(seconds).encode()))
    if isinstance(error, CUTS_SHORT):
        headers.append((b"connection", b"close"))
    return headers


def _affinity(headers: dict[bytes, bytes]) -> str | None:
    value = headers.get(b"x-session-affinity", b"").decode("latin-1")
    return value[:_MAX_AFFINITY] or None


def _obeyed(headers: dict[bytes, bytes], parsed: Parsed) -> Parsed:
    """`parsed` with what headers ask for in every dialect."""
    if headers.get(b"x-skerry-reject-if-busy", b"").lower() not in (b"1", b"true"):
        return parsed
    request = msgspec.structs.replace(parsed.request, reject_if_busy=True)
    return replace(parsed, request=request)
