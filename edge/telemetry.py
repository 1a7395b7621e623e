"""Traces for whoever collects them: each request as OpenTelemetry spans of all its hops.

An edge knows the whole story of a request when it ends (`core.story`), so it tells it, and no other
process has to. Names and attributes are those of OpenTelemetry's conventions for generative AI
where there are such; nothing of a prompt or an answer is among them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from core.errors import ConfigError
from core.release import release
from core.story import Step, Story, waterfall

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

OPERATIONS = {"chat": "chat", "completions": "text_completion"}
"""Our dialects as the conventions call what they do; others keep their names."""
_PARENT = re.compile(r"00-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})")
_NS = 1_000_000_000

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Span:
    """`start_s` and `end_s`: Unix seconds. The first of several is the parent of the others."""

    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Value] = field(default_factory=dict)
    failed: str = ""


class Telemetry(Protocol):
    def tell(self, story: Callable[[], Story], parent: str) -> None:
        """A request has ended. `parent` is its caller's traceparent header, empty without one."""
        ...


class Silent:
    def tell(self, story: Callable[[], Story], parent: str) -> None:
        return


class Otlp:
    """Sends in batches, from a thread of the SDK's; a collector that is away costs spans alone."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("skerry.edge", release())

    def tell(self, story: Callable[[], Story], parent: str) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        context = _context_of(parent)
        for number, span in enumerate(spans_of(story())):
            told = self._tracer.start_span(
                span.name,
                context=context,
                kind=SpanKind.INTERNAL if number else SpanKind.SERVER,
                attributes=span.attributes,
                start_time=int(span.start_s * _NS),
            )
            if span.failed:
                told.set_status(Status(StatusCode.ERROR, span.failed))
            told.end(int(span.end_s * _NS))
            if not number:
                context = set_span_in_context(told)


def spans_of(story: Story) -> list[Span]:
    """The request, and each step of its waterfall. Pure."""
    began = story.at
    end_s = story.age_s if story.ended_s is None else story.ended_s
    operation = OPERATIONS.get(story.dialect, story.dialect)
    model = story.model or "unknown"
    failed = "" if story.outcome in ("", "ok") else story.outcome
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": model,
        "gen_ai.provider.name": "skerry",
        "gen_ai.usage.input_tokens": story.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": story.cached_tokens,
        "gen_ai.usage.output_tokens": story.completion_tokens,
        "skerry.request.id": story.id,
        "skerry.edge": story.edge,
        "skerry.stream": story.stream,
    }
    last = story.last
    if last is not None:
        attributes |= {"skerry.region": last.region, "skerry.route": last.reason}
        for name, value in (("prefill", last.prefill), ("decode", last.decode)):
            if value is not None:
                attributes[f"skerry.{name}"] = value
    if failed:
        attributes["error.type"] = failed
    whole = Span(f"{operation} {model}", began, began + end_s, attributes, failed)
    return [whole, *(_step(step, began) for step in waterfall(story))]


def _step(step: Step, began: float) -> Span:
    start = began + step.start_s
    attributes: dict[str, Value] = {"skerry.note": step.note} if step.note else {}
    return Span(str(step.name), start, start + step.seconds, attributes)


@asynccontextmanager
async def open_telemetry(endpoint: str | None, edge: str) -> AsyncIterator[Telemetry]:
    """`endpoint`: base URL of an OTLP collector over HTTP; None tells nobody. Raises
    ConfigError."""
    if endpoint is None:
        yield Silent()
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "observe.otlp needs OpenTelemetry's SDK: pip install 'skerry[otel]'"
        ) from error
    resource = Resource.create(
        {"service.name": "skerry-edge", "service.instance.id": edge, "service.version": release()}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=5)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield Otlp(provider)
    finally:
        await asyncio.to_thread(provider.shutdown)  # sends what is left


def _context_of(parent: str) -> Context | None:
    """The caller's trace, where its header is well formed."""
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    found = _PARENT.fullmatch(parent)
    if found is None:
        return None
    context = SpanContext(
        trace_id=int(found["trace"], 16),
        span_id=int(found["span"], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(found["flags"], 16)),
    )
    return set_span_in_context(NonRecordingSpan(context)) if context.is_valid else None
