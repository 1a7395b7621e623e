"""Spans on their way to an OpenTelemetry collector, by its SDK: imported where one is named."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from core.release import release
from core.telemetry import Kind, Span, TraceContext

_log = logging.getLogger("skerry.telemetry")

SEND_EVERY_S = 1.0
"""A process that is killed takes at most so much of what it noted with it."""
MOST_WAITING = 2048
"""Spans that wait to be sent; the oldest ones give way."""
FLUSH_S = 2.0
"""How long a process that ends waits for its collector."""
_NS = 1_000_000_000


class Otlp:
    """Sends in batches, from a thread of the SDK's; a collector that is away costs spans alone.
    See `core.telemetry.Telemetry`."""

    on = True

    def __init__(self, endpoint: str, process: str, name: str) -> None:
        """`endpoint`: the collector's base URL. `process` and `name` say who speaks."""
        self._resource = Resource.create(
            {
                "service.name": f"skerry-{process}",
                "service.instance.id": name,
                "service.version": release(),
            }
        )
        self._scope = InstrumentationScope("skerry", release())
        self._exporter = _ToldOnce(endpoint)
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=MOST_WAITING, schedule_delay_millis=SEND_EVERY_S * 1000
        )

    def tell(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._processor.on_end(self._readable(span))  # which leaves out what is not sampled

    async def close(self) -> None:
        """Send what is left, as far as the collector takes it soon."""
        ending = asyncio.create_task(asyncio.to_thread(self._processor.shutdown))
        await asyncio.wait({ending}, timeout=FLUSH_S)
        if not ending.done():
            self._exporter.shutdown()  # it is tried no more
        await ending

    def _readable(self, span: Span) -> ReadableSpan:
        # Not by way of a tracer: it gives out ids when a span starts, and ours were sent to the
        # next hop before.
        above = span.context.parent
        remote = span.kind is Kind.SERVER
        return ReadableSpan(
            span.name,
            context=_context(span.context, span.context.span),
            parent=_context(span.context, above, remote=remote) if above else None,
            resource=self._resource,
            attributes=span.attributes,
            kind=SpanKind[span.kind.value],
            status=Status(StatusCode.ERROR, span.failed) if span.failed else Status(),
            start_time=int(span.start_s * _NS),
            end_time=int(max(span.start_s, span.end_s) * _NS),
            instrumentation_scope=self._scope,
        )


class _ToldOnce(SpanExporter):
    """The SDK's exporter, whose complaints about a collector that is away come each second: ours
    are one line when it goes and one when it is back."""

    def __init__(self, endpoint: str) -> None:
        url = f"{endpoint.rstrip('/')}/v1/traces"
        self._inner = OTLPSpanExporter(endpoint=url, timeout=FLUSH_S)
        self._shown = url.rpartition("@")[2]  # a password before it is not for the log
        self._away = False
        self._over = False
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        away = result is not SpanExportResult.SUCCESS
        if away and not self._away:
            _log.warning("collector away, spans are dropped url=%s", self._shown)
        elif self._away and not away:
            _log.info("collector back url=%s", self._shown)
        self._away = away
        return result

    def shutdown(self) -> None:
        """Idempotent."""
        if not self._over:
            self._over = True
            self._inner.shutdown()  # type: ignore[no-untyped-call]  # as the SDK has it


def _context(place: TraceContext, span: int, *, remote: bool = False) -> SpanContext:
    return SpanContext(place.trace, span, is_remote=remote, trace_flags=TraceFlags(place.flags))
