"""The measurements. Each compares what took turns within one round on the same cores."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvloop

from loadtest.edge import clients
from loadtest.edge.cast import Running
from loadtest.edge.clients import Seen

T = TypeVar("T")
CLIENTS, EVENTS = 16, 64


@dataclass(frozen=True, slots=True)
class Burst:
    """Streams whose events come at once."""

    streams_per_s: float
    cpu_us: float
    """Of a stream, in the gateway."""


@dataclass(frozen=True, slots=True)
class Paced:
    """Many streams at a steady pace."""

    gap_p50_ms: float
    gap_p99_ms: float
    cpu_us: float
    """Of an event, in the gateway."""
    resident_mb: float
    kept_pace: float
    """Events a second over those wished for: well below 1, the machine was not up to it."""


@dataclass(slots=True)
class First:
    """Milliseconds to the first piece at 16 streams."""

    p50: float
    p99: float


@dataclass(slots=True)
class Samples:
    """What all rounds brought, by contestant."""

    bursts: dict[str, list[Burst]] = field(default_factory=dict)
    firsts: dict[str, list[First]] = field(default_factory=dict)
    paced: dict[str, Paced] = field(default_factory=dict)


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def warm(one: Running) -> None:
    run(clients.play(one.port, clients=CLIENTS, streams=10, events=EVENTS, pause_ms=0))


def burst(one: Running, streams: int) -> Burst:
    """`streams` by each of 16 clients, as fast as they come."""
    cpu, began = one.cpu_s(), time.monotonic()
    run(clients.play(one.port, clients=CLIENTS, streams=streams, events=EVENTS, pause_ms=0))
    count = CLIENTS * streams
    return Burst(count / (time.monotonic() - began), (one.cpu_s() - cpu) / count * 1e6)


def first(one: Running, streams: int) -> First:
    """16 streams at a time, each of 25 events 20 ms apart: the first piece among others' pieces."""
    seen = run(
        clients.play(
            one.port, clients=CLIENTS, streams=streams, events=25, pause_ms=20, spread_s=0.5
        )
    )
    times = [stream.first_ms for stream in seen]
    return First(quantile(times, 0.5), quantile(times, 0.99))


def paced(one: Running, *, streams: int, events: int, pause_ms: int) -> Paced:
    cpu = one.cpu_s()
    seen = run(
        clients.play(
            one.port, clients=streams, streams=1, events=events, pause_ms=pause_ms, spread_s=2.0
        )
    )
    gaps = [gap for stream in seen for gap in stream.added_gaps_ms()]
    return Paced(
        gap_p50_ms=quantile(gaps, 0.5),
        gap_p99_ms=quantile(gaps, 0.99),
        cpu_us=(one.cpu_s() - cpu) / (streams * events) * 1e6,
        resident_mb=one.resident_mb(),
        kept_pace=_pace(seen, pause_ms),
    )


def quantile(numbers: Sequence[float], share: float) -> float:
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _pace(seen: Sequence[Seen], pause_ms: int) -> float:
    sent = [(stream.pairs[-1][0] - stream.pairs[0][0]) / (len(stream.pairs) - 1) for stream in seen]
    return pause_ms * 1000 / (sum(sent) / len(sent))
