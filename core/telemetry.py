"""Spans for whoever collects them: where a hop stands in a request's trace, and the way out.

A trace is told by all hops. Each makes its own span from what it noted, when its part is over;
what goes with the request is W3C's `traceparent`, so that the next hop's span is a child of the
attempt that brought it there. Names and attributes are those of OpenTelemetry's conventions for
generative AI where there are such; nothing of a prompt or an answer is among them.
"""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from core.errors import ConfigError

OPERATIONS = {"chat": "chat", "completions": "text_completion"}
"""Our dialects as the conventions call what they do; others keep their names."""
PROVIDER = "skerry"
MOST_ATTEMPTS = 32
"""Attempts of one request at one hop that are told: one that is refused again and again is not to
fill the collector."""
_SAMPLED = 1
_HEADER = re.compile(
    r"(?P<version>(?!ff)[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})"
    r"-(?P<span>(?!0{16})[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)

Value = str | int | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span's place. `parent` is another span's id, 0 for none; `flags` are W3C's."""

    trace: int
    span: int
    parent: int = 0
    flags: int = _SAMPLED

    @property
    def sampled(self) -> bool:
        """Whoever began the trace wants it to be kept."""
        return bool(self.flags & _SAMPLED)

    def child(self) -> TraceContext:
        return replace(self, span=_id(64), parent=self.span)

    def untold(self) -> TraceContext:
        """The same, with nothing below it to be kept."""
        return replace(self, flags=self.flags & ~_SAMPLED)

    def __str__(self) -> str:
        """A `traceparent` header."""
        return f"00-{self.trace:032x}-{self.span:016x}-{self.flags:02x}"


def read_context(header: str) -> TraceContext | None:
    """Where a `traceparent` says its sender stands; None for what is no such header. Of a version
    to come the part that this one has is read, as W3C asks."""
    found = _HEADER.fullmatch(header)
    if found is None or (found["version"] == "00" and found["more"]):
        return None
    return TraceContext(int(found["trace"], 16), int(found["span"], 16), 0, int(found["flags"], 16))


def enter(header: str) -> TraceContext:
    """The span of this hop: in its caller's trace, or the first of a new one."""
    above = read_context(header)
    return TraceContext(_id(128), _id(64)) if above is None else above.child()


class Kind(StrEnum):
    """Whose side of an exchange a span tells."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


@dataclass(frozen=True, slots=True)
class Span:
    """`start_s` and `end_s`: Unix seconds. `failed`: an error's code, empty where all went well."""

    name: str
    context: TraceContext
    start_s: float
    end_s: float
    attributes: dict[str, Value] = field(default_factory=dict)
    kind: Kind = Kind.INTERNAL
    failed: str = ""


class Telemetry(Protocol):
    @property
    def on(self) -> bool:
        """Is there anybody to tell? Where not, nobody notes anything for a span."""
        ...

    def tell(self, spans: Iterable[Span]) -> None:
        """What of them is sampled is sent some time. Never waits, never raises."""
        ...


class Silent:
    on = False

    def tell(self, spans: Iterable[Span]) -> None:
        return


SILENT = Silent()


@asynccontextmanager
async def open_telemetry(endpoint: str | None, process: str, name: str) -> AsyncIterator[Telemetry]:
    """`endpoint`: base URL of an OTLP collector over HTTP; None tells nobody. `process` and `name`
    say who speaks. Raises ConfigError."""
    if endpoint is None:
        yield SILENT
        return
    try:
        from core.otlp import Otlp  # only here is the SDK needed
    except ImportError as error:
        raise ConfigError(
            "observe.otlp needs OpenTelemetry's SDK: pip install 'skerry[otel]'"
        ) from error
    told = Otlp(endpoint, process, name)
    try:
        yield told
    finally:
        await told.close()


def _id(bits: int) -> int:
    return random.getrandbits(bits) or 1
