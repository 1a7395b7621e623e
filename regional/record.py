"""What a router notes of one request, for its one log line and its spans.

Times are this process's monotonic ones until they are told.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from core.events import Done
from core.telemetry import (
    MOST_ATTEMPTS,
    PROVIDER,
    Kind,
    Span,
    Telemetry,
    TraceContext,
    Value,
    enter,
)
from core.types import GenerateRequest, Timings, Usage
from regional.dispatch import Placed

_log = logging.getLogger("skerry.request")

PREEMPTED = "preempted"
"""How an attempt ends that goes on at another node."""


@dataclass(slots=True)
class _Attempt:
    id: str
    placed: Placed
    context: TraceContext | None
    waited_from: float
    began: float
    first: float | None = None
    ended: float | None = None
    outcome: str = ""


class Record:
    """`region`: who speaks. What only spans need is noted where somebody collects them."""

    def __init__(self, request: GenerateRequest, region: str, telemetry: Telemetry) -> None:
        self._request = request
        self._region = region
        self._telemetry = telemetry
        self._context = enter(request.trace) if telemetry.on else None
        self._began = self._waits_from = time.monotonic()
        self._read: float | None = None
        self._prompt_tokens = 0
        self._count = 0
        self._waits = False
        """It is in the queue, since then."""
        self._attempts: list[_Attempt] = []
        """The first ones, and always the last."""

    def was_read(self, prompt_tokens: int) -> None:
        self._read = self._waits_from = time.monotonic()
        self._waits, self._prompt_tokens = True, prompt_tokens

    def placed(self, attempt_id: str, placed: Placed) -> str:
        """An attempt begins: the traceparent for its nodes, empty where nobody collects."""
        self._count += 1
        self._waits = False
        context = None if self._context is None else self._context.child()
        if self._count >= MOST_ATTEMPTS:
            del self._attempts[MOST_ATTEMPTS - 1 :]
            context = None if context is None else context.untold()
        now = time.monotonic()
        self._attempts.append(_Attempt(attempt_id, placed, context, self._waits_from, now))
        return "" if context is None else str(context)

    def first(self) -> None:
        """The present attempt has brought a piece of the answer."""
        self._attempts[-1].first = time.monotonic()

    def ended(self, outcome: str) -> None:
        """The present attempt is over, and the request is not."""
        self._waits, self._waits_from = True, time.monotonic()
        self._attempts[-1].ended, self._attempts[-1].outcome = self._waits_from, outcome

    def close(self, outcome: str, done: Done | None) -> None:
        """This hop's one line, and what it tells the collector."""
        now = time.monotonic()
        if self._attempts and self._attempts[-1].ended is None:
            self._attempts[-1].ended, self._attempts[-1].outcome = now, outcome
        self._say(outcome, done, now)
        if self._context is not None and self._context.sampled:
            self._telemetry.tell(self._spans(self._context, outcome, done, now))

    def _say(self, outcome: str, done: Done | None, now: float) -> None:
        last = self._attempts[-1] if self._attempts else None
        placement = last.placed.placement if last else None
        usage, timings = self._usage(done), self._timings(done, now)
        _log.info(
            "passed id=%s outcome=%s model=%s attempts=%d prefill=%s decode=%s reason=%s prompt=%d"
            " cached=%d completion=%d read_ms=%d queue_ms=%d prefill_ms=%d decode_ms=%d ms=%d"
            " kv_bytes=%d",
            self._request.id,
            outcome,
            self._request.model,
            self._count,
            placement.prefill.node if placement and placement.prefill else "-",
            placement.decode.node if placement else "-",
            placement.reason if placement else "-",
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            ((self._read or now) - self._began) * 1000,
            timings.queue_s * 1000,
            timings.prefill_s * 1000,
            timings.decode_s * 1000,
            (now - self._began) * 1000,
            timings.kv_bytes,
        )

    def _usage(self, done: Done | None) -> Usage:
        if done is not None:
            return done.usage
        return Usage(prompt_tokens=self._prompt_tokens, completion_tokens=0)

    def _timings(self, done: Done | None, now: float) -> Timings:
        """The nodes' word, or, of a request without an end, what was seen of it from here."""
        if done is not None:
            return done.timings
        if not self._attempts:
            return Timings(queue_s=0.0 if self._read is None else now - self._read)
        last = self._attempts[-1]
        ended = now if last.ended is None else last.ended
        first = ended if last.first is None else last.first
        return Timings(
            queue_s=last.began - last.waited_from,
            prefill_s=first - last.began,
            decode_s=ended - first,
        )

    def _spans(
        self, context: TraceContext, outcome: str, done: Done | None, now: float
    ) -> list[Span]:
        wall = time.time() - time.monotonic()
        usage = self._usage(done)
        attributes: dict[str, Value] = {
            "gen_ai.request.model": self._request.model,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "skerry.request.id": self._request.id,
            "skerry.region": self._region,
            "skerry.attempts": self._count,
        }
        failed = "" if outcome == "ok" else outcome
        if failed:
            attributes["error.type"] = failed
        whole = Span(
            "region", context, wall + self._began, wall + now, attributes, Kind.SERVER, failed
        )
        steps = [("read", self._began, now if self._read is None else self._read)]
        steps += [("queue", one.waited_from, one.began) for one in self._attempts]
        if self._waits:
            steps.append(("queue", self._waits_from, now))
        return [
            whole,
            *(Span(name, context.child(), wall + at, wall + to) for name, at, to in steps),
            *(_told(one, one.context, wall) for one in self._attempts if one.context is not None),
        ]


def _told(one: _Attempt, context: TraceContext, wall: float) -> Span:
    """An attempt that is over."""
    placed, placement = one.placed, one.placed.placement
    attributes: dict[str, Value] = {
        "skerry.attempt.id": one.id,
        "skerry.decode": placement.decode.node,
        "skerry.reason": placement.reason.value,
        "skerry.tokens.reusable": placed.reusable_tokens,
        "skerry.tokens.routed": placement.cached_tokens,
        "skerry.tokens.pulled": placement.pull.tokens if placement.pull else 0,
        "skerry.tokens.compute": placement.compute_tokens,
    }
    if placement.prefill is not None:
        attributes["skerry.prefill"] = placement.prefill.node
    if one.first is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = one.first - one.began
    failed = "" if one.outcome in ("ok", PREEMPTED) else one.outcome
    if failed:
        attributes["error.type"] = failed
    elif one.outcome == PREEMPTED:
        attributes["skerry.preempted"] = True
    ended = one.began if one.ended is None else one.ended
    return Span("attempt", context, wall + one.began, wall + ended, attributes, Kind.CLIENT, failed)
