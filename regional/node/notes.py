"""What a node notes of one attempt: its one log line when it is over, and its spans where the
router that sent it is traced."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from core.errors import Cancelled, DeadlineExceeded, RequestError
from core.telemetry import PROVIDER, Kind, Span, Telemetry, TraceContext, Value, read_context
from core.types import GenerateRequest

_log = logging.getLogger("skerry.request")

Facts = Mapping[str, int | str]
"""Counts and words of closed sets, by the name that the log line has for them."""
SPANS = {"answered": "answer", "prefilled": "prefill", "sent": "send"}
"""What a node does, as its line says it and as its span is called."""
_ABORTS = {
    "client_gone": Cancelled.code,
    "deadline": DeadlineExceeded.code,
    "moved": "moved",
    "failed": "failed",
}
"""The outcome of an attempt that its router aborts, by the reason that it gives."""
_NOTHING: Mapping[str, Value] = MappingProxyType({})
ROUTER_LOST = "router_lost"
PREEMPTED = "preempted"


def aborted(reason: str) -> str:
    return _ABORTS.get(reason, "aborted")


class Notebook:
    """Where a node's notes go. `name` is the node's, `clock` that of its front."""

    def __init__(self, name: str, clock: Callable[[], float], telemetry: Telemetry) -> None:
        self.name = name
        self.clock = clock
        self.telemetry = telemetry

    def open(self, did: str, attempt_id: str) -> Notes:
        """`did`: a key of `SPANS`."""
        return Notes(self, did, attempt_id)


class Notes:
    """Of one attempt, from its arrival on. `outcome` is ok, an error's code, or one of the words
    above."""

    def __init__(self, book: Notebook, did: str, attempt_id: str) -> None:
        self.outcome = Cancelled.code
        self._book = book
        self._did = did
        self._attempt_id = attempt_id
        self._model = "-"
        self._context: TraceContext | None = None
        self._began = book.clock()
        self._steps: dict[str, tuple[float, float | None]] = {}

    def taken(self, request: GenerateRequest) -> None:
        """It is let in."""
        self._model = request.model
        if self._book.telemetry.on:
            above = read_context(request.trace)
            self._context = above.child() if above is not None and above.sampled else None

    def refused(self, error: RequestError) -> None:
        """It is not let in, or cannot be done here."""
        self.outcome = error.code
        self.close({})

    def begin(self, step: str) -> None:
        if self._context is not None:
            self._steps.setdefault(step, (self._book.clock(), None))

    def end(self, step: str) -> None:
        """Nothing, where it had not begun."""
        if step in self._steps:
            self._steps[step] = self._steps[step][0], self._book.clock()

    @property
    def traced(self) -> bool:
        return self._context is not None

    def close(self, facts: Facts, more: Mapping[str, Value] = _NOTHING) -> None:
        """Say it, once. `more`: of the span alone."""
        now = self._book.clock()
        request_id, _, number = self._attempt_id.rpartition(".")
        _log.info(
            "%s id=%s attempt=%s outcome=%s model=%s%s ms=%d",
            self._did,
            request_id,
            number,
            self.outcome,
            self._model,
            "".join(f" {name}={value}" for name, value in facts.items()),
            (now - self._began) * 1000,
        )
        if self._context is not None:
            self._book.telemetry.tell(self._spans(self._context, facts, more, now))

    def _spans(
        self, context: TraceContext, facts: Facts, more: Mapping[str, Value], now: float
    ) -> list[Span]:
        wall = time.time() - now
        attributes: dict[str, Value] = {
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "skerry.node": self._book.name,
            "skerry.attempt.id": self._attempt_id,
            **{f"skerry.{name}": value for name, value in facts.items()},
            **more,
        }
        failed = "" if self.outcome in ("ok", PREEMPTED) else self.outcome
        if failed:
            attributes["error.type"] = failed
        name = SPANS[self._did]
        began = wall + self._began
        whole = Span(name, context, began, wall + now, attributes, Kind.SERVER, failed)
        steps = [
            Span(step, context.child(), wall + began, wall + (now if ended is None else ended))
            for step, (began, ended) in self._steps.items()
        ]
        return [whole, *steps]
