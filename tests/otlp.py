"""A collector of OpenTelemetry spans over HTTP, as any is: it takes what it is sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from core.telemetry import Span

Value = str | int | float | bool | list[str]


@dataclass(frozen=True, slots=True)
class Told:
    """One span; `service` and `instance` say who told it."""

    service: str
    instance: str
    name: str
    trace: str
    id: str
    parent: str
    kind: str
    began_ns: int
    ended_ns: int
    failed: str
    attributes: dict[str, Value]


@dataclass(slots=True)
class Collected:
    url: str
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)
    """Cleared: what is sent is not answered until it is set."""
    refuses: bool = False

    @property
    def spans(self) -> list[Told]:
        return [
            _told(part.resource.attributes, span)
            for request in self.requests
            for part in request.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]

    def trace(self, trace: str) -> list[Told]:
        return [span for span in self.spans if span.trace == trace]


class Ear:
    """Who is told, without a wire."""

    on = True

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def tell(self, spans: Iterable[Span]) -> None:
        self.spans += spans

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collecting() -> Iterator[Collected]:
    """A collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            if got.refuses:
                self.send_error(400)
                return
            got.requests.append(ExportTraceServiceRequest.FromString(body))
            got.open.wait(30)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    got = Collected(f"http://127.0.0.1:{server.server_port}")
    got.open.set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield got
    finally:
        got.open.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _told(resource: object, span: Sent) -> Told:
    by = {one.key: _value(one.value) for one in resource}  # type: ignore[attr-defined]  # protobuf
    failed = span.status.code == Status.STATUS_CODE_ERROR
    return Told(
        service=str(by["service.name"]),
        instance=str(by["service.instance.id"]),
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=Sent.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        failed=span.status.message if failed else "",
        attributes={one.key: _value(one.value) for one in span.attributes},
    )


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [one.string_value for one in value.array_value.values]
    told: Value = getattr(value, kind or "string_value")
    return told
