"""What an edge knows about one request while it runs: for headers, trace, log line and metrics."""

from __future__ import annotations

import logging
import secrets
import time

import msgspec

from core.events import Done
from core.metrics import EdgeMetrics
from core.telemetry import OPERATIONS
from core.types import GenerateRequest, RequestId, Timings
from edge.gateway import Batch, Place
from edge.journal import Journal
from edge.tenants.budget import Tab
from edge.tenants.door import Caller

_log = logging.getLogger("skerry.request")


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request went and where its time went, as told to the caller; seconds and bytes."""

    edge: str
    region: str
    prefill: str | None
    decode: str | None
    reason: str
    node_reason: str
    queue_s: float
    prefill_s: float
    decode_s: float
    transfer_s: float
    kv_bytes: int


class Record:
    """Written by the exchange that owns it; read when something is told about the request."""

    def __init__(self, edge: str, dialect: str) -> None:
        self._edge = edge
        self._dialect = dialect
        self.request_id = RequestId(secrets.token_hex(12))
        self.journal = Journal(self.request_id, dialect)
        self._began = time.monotonic()
        self._first_s: float | None = None
        self._place: Place | None = None
        self.request: GenerateRequest | None = None
        """None until the body is parsed."""
        self.caller: Caller | None = None
        """None until the door knows who it is."""
        self.tab: Tab | None = None
        """None until the request is let in."""
        self.done: Done | None = None

    def see(self, batch: Batch) -> None:
        """Take note of what came, before it goes out. Raises InternalError where the usage of a
        whole answer cannot be written down."""
        if self._first_s is None:
            self._first_s = time.monotonic() - self._began
        self._place = batch.place
        if self.tab is not None:
            self.tab.see(batch)
        if isinstance(batch.events[-1], Done):
            self.done = batch.events[-1]
            if self.tab is not None:
                self.tab.finish(self.done)

    def anew(self) -> None:
        """What was seen is void, and the caller has been shown nothing of it."""
        if self.tab is not None:
            self.tab.anew()

    def headers(self, *, expose_nodes: bool) -> list[tuple[bytes, bytes]]:
        """The answer's headers as far as they are known now."""
        headers = [(b"x-request-id", self.request_id.encode())]
        place = self._place
        if place is not None:
            headers.append((b"x-skerry-region", place.region.encode()))
            headers.append((b"x-skerry-route", place.reason.encode()))
            if expose_nodes and place.prefill is not None:
                headers.append((b"x-skerry-prefill", place.prefill.encode()))
            if expose_nodes and place.decode is not None:
                headers.append((b"x-skerry-decode", place.decode.encode()))
        if self.tab is not None:
            headers += self.tab.headers()
        headers.append((b"server-timing", self._server_timing().encode()))
        return headers

    def trace(self) -> bytes:
        """JSON of a `Trace`, one line; only once a place is known."""
        assert self._place is not None, "a trace is of a request that was placed"
        place, timings = self._place, self.done.timings if self.done else Timings()
        return msgspec.json.encode(
            Trace(
                edge=self._edge,
                region=place.region,
                prefill=place.prefill,
                decode=place.decode,
                reason=place.reason,
                node_reason=place.node_reason,
                queue_s=timings.queue_s,
                prefill_s=timings.prefill_s,
                decode_s=timings.decode_s,
                transfer_s=timings.transfer_s,
                kv_bytes=timings.kv_bytes,
            )
        )

    def close(self, outcome: str, metrics: EdgeMetrics) -> None:
        """Count the request and write its one log line."""
        self.journal.close(outcome)
        total_s = time.monotonic() - self._began
        metrics.requests.labels(self._dialect, outcome).inc()
        region = self._place.region if self._place else "-"
        if self._place is not None:
            metrics.request_seconds.labels(region).observe(total_s)
            if self._first_s is not None:
                metrics.first_delta_seconds.labels(region).observe(self._first_s)
        model = self.request.model if self.request else "-"
        metrics.gen_ai.ended(
            OPERATIONS.get(self._dialect, self._dialect),
            model,
            "" if outcome == "ok" else outcome,
            seconds=total_s,
            first_s=self._first_s,
            usage=self.done.usage if self.done else None,
        )
        prompt = cached = completion = 0
        if self.done is not None:
            usage = self.done.usage
            prompt, cached = usage.prompt_tokens, usage.cached_tokens
            completion = usage.completion_tokens
            metrics.prompt_tokens.labels(model).inc(prompt)
            metrics.cached_tokens.labels(model).inc(cached)
            metrics.completion_tokens.labels(model).inc(completion)
        _log.info(
            "answered id=%s dialect=%s tenant=%s key=%s outcome=%s model=%s region=%s route=%s"
            " prompt=%d cached=%d completion=%d first_ms=%d ms=%d trace=%s",
            self.request_id,
            self._dialect,
            self.caller.name if self.caller else "-",
            self.caller.key_id if self.caller else "-",
            outcome,
            model,
            region,
            self._place.reason if self._place else "-",
            prompt,
            cached,
            completion,
            (self._first_s or 0.0) * 1000,
            total_s * 1000,
            self.journal.trace_id or "-",
        )

    def _server_timing(self) -> str:
        spans: list[tuple[str, float]] = [("admit", self.journal.admitted_s)]
        if self.journal.held_s:
            spans.append(("hold", self.journal.held_s))
        if self._first_s is not None:
            spans.append(("first", self._first_s))
        if self.done is not None:
            timings = self.done.timings
            spans += [
                ("queue", timings.queue_s),
                ("prefill", timings.prefill_s),
                ("decode", timings.decode_s),
                ("transfer", timings.transfer_s),
            ]
        spans.append(("total", time.monotonic() - self._began))
        return ", ".join(f"{name};dur={seconds * 1000:.1f}" for name, seconds in spans)
