"""What an edge notes of one request while it runs, and the last ones of them for `skerry explain`.

A journal holds no text of its request; `Recent` is bounded in number and in age.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from core.events import Accepted, Done, Moved
from core.story import Choice, Kept, Story, Try, Wait, Weighed
from core.types import GenerateRequest, ModelName, RegionName, RequestId
from edge.routing.placement import RouteDecision
from edge.telemetry import Traced

KEPT_REQUESTS = 1000
KEPT_S = 900.0

_PREFIXES = ("chatcmpl-", "cmpl-")


@dataclass(frozen=True, slots=True)
class Key:
    """How a request's route key was made."""

    depth: int
    blocks: int
    text_bytes: int
    hot_version: str
    by_affinity: bool


class Journal:
    """Written by whoever has the request in hand."""

    def __init__(
        self,
        request_id: RequestId,
        dialect: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.id = request_id
        self.traced: Traced | None = None
        """Its trace, where there is somebody to tell."""
        self._dialect = dialect
        self._clock = clock
        self._at = wall()
        self._began = clock()
        self._tenant = self._key = self._by = ""
        self._model: ModelName | None = None
        self._stream = False
        self._admitted_s: float | None = None
        self._choices: list[tuple[float, RouteDecision, Key]] = []
        self._waits: list[Wait] = []
        self._tries: list[Try] = []
        self._tried_before_wait = 0
        self._done: Done | None = None
        self._outcome = ""
        self._ended_s: float | None = None

    def now_s(self) -> float:
        return self._clock() - self._began

    @property
    def trace_id(self) -> str:
        """As collectors show it; empty where nobody collects."""
        return "" if self.traced is None else f"{self.traced.context.trace:032x}"

    @property
    def admitted_s(self) -> float:
        """0 until it is."""
        return self._admitted_s or 0.0

    @property
    def held_s(self) -> float:
        """In the edge's queue so far."""
        now = self.now_s()
        return sum((now if w.ended_s is None else w.ended_s) - w.began_s for w in self._waits)

    def asked_by(self, tenant: str, key: str, worker: str = "") -> None:
        """`key`: its ID. `worker`: the Worker that asks."""
        self._tenant, self._key, self._by = tenant, key, worker

    def admitted(self, request: GenerateRequest, *, stream: bool) -> None:
        self._admitted_s = self.now_s()
        self._model, self._stream = request.model, stream

    def chose(self, decision: RouteDecision, key: Key) -> None:
        """The first choice and the last are kept: a held request makes many."""
        self._choices = [*self._choices[:1], (self.now_s(), decision, key)]

    def held(self, position: int) -> None:
        self._waits.append(Wait(began_s=self.now_s(), position=position))
        self._tried_before_wait = len(self._tries)

    def turn(self) -> None:
        """Its turn has come, or its waiting is over in another way. Idempotent."""
        if self._waits and self._waits[-1].ended_s is None:
            self._waits[-1] = replace(self._waits[-1], ended_s=self.now_s())

    def refused_again(self) -> None:
        """The turn brought only refusals: it waits on, and they are counted, not listed."""
        last = self._waits[-1]
        self._waits[-1] = replace(last, ended_s=None, refused=last.refused + 1)
        del self._tries[self._tried_before_wait :]

    def tried(self, region: RegionName, reason: str) -> None:
        self._tries.append(Try(region=region, reason=reason, began_s=self.now_s()))
        if self.traced is not None:
            self.traced.tried(region, reason, self.now_s())

    def placed(self, event: Accepted | Moved) -> None:
        """The present attempt has its nodes."""
        one = self._tries[-1]
        self._tries[-1] = replace(
            one,
            accepted_s=self.now_s() if one.accepted_s is None else one.accepted_s,
            prefill=event.prefill,
            decode=event.decode,
            node_reason=event.reason,
            placing=event.placing or None,
        )

    def first(self) -> None:
        """The present attempt has brought the first piece of the answer."""
        self._tries[-1] = replace(self._tries[-1], first_s=self.now_s())

    def ended(self, outcome: str, done: Done | None = None) -> None:
        """The present attempt is over."""
        if self._tries[-1].ended_s is None:
            self._tries[-1] = replace(self._tries[-1], ended_s=self.now_s(), outcome=outcome)
        if self.traced is not None:
            self.traced.ended(outcome, self.now_s())
        self._done = done or self._done

    def close(self, outcome: str) -> None:
        self.turn()
        if self._tries:
            self.ended(outcome)
        self._outcome, self._ended_s = outcome, self.now_s()

    def story(self, edge: str, worker: int) -> Story:
        age_s = self.now_s()
        usage = self._done.usage if self._done else None
        return Story(
            id=self.id,
            edge=edge,
            worker=worker,
            dialect=self._dialect,
            at=self._at,
            age_s=age_s,
            tenant=self._tenant,
            key=self._key,
            by=self._by,
            model=self._model,
            stream=self._stream,
            outcome=self._outcome,
            admitted_s=self._admitted_s,
            choices=tuple(_choice(*one) for one in self._choices),
            waits=tuple(self._waits),
            tries=tuple(self._tries),
            ended_s=self._ended_s,
            prompt_tokens=usage.prompt_tokens if usage else 0,
            cached_tokens=usage.cached_tokens if usage else 0,
            completion_tokens=usage.completion_tokens if usage else 0,
            timings=self._done.timings if self._done else None,
        )


class Recent:
    """The journals of one worker process, the newest last."""

    def __init__(
        self,
        edge: str,
        worker: int,
        *,
        requests: int = KEPT_REQUESTS,
        seconds: float = KEPT_S,
    ) -> None:
        self._edge = edge
        self._worker = worker
        self._kept = Kept(requests=requests, seconds=seconds)
        self._journals: OrderedDict[RequestId, Journal] = OrderedDict()

    @property
    def kept(self) -> Kept:
        return self._kept

    def open(self, journal: Journal) -> None:
        self._journals[journal.id] = journal
        while len(self._journals) > self._kept.requests or self._oldest_s() > self._kept.seconds:
            self._journals.popitem(last=False)

    def find(self, name: str) -> Story | None:
        """By id, or by the id as an answer's body has it."""
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        journal = self._journals.get(RequestId(name))
        return None if journal is None else journal.story(self._edge, self._worker)

    def story(self, journal: Journal) -> Story:
        return journal.story(self._edge, self._worker)

    def newest(self, count: int) -> Iterator[Story]:
        for journal in list(reversed(self._journals.values()))[:count]:
            yield journal.story(self._edge, self._worker)

    def _oldest_s(self) -> float:
        return next(iter(self._journals.values())).now_s()


def _choice(at_s: float, decision: RouteDecision, key: Key) -> Choice:
    return Choice(
        at_s=at_s,
        reason=decision.reason,
        order=decision.candidates,
        weighed=tuple(
            Weighed(
                region=one.region,
                standing=one.standing,
                round_trip_s=one.round_trip_s,
                wait_s=one.wait_s,
                read_s=one.read_s,
                held_tokens=one.held_tokens,
                work_s=one.work_s,
                total_s=one.total_s,
                cost_s=one.cost_s,
            )
            for one in decision.options
        ),
        bound_s=decision.bound_s,
        key_depth=key.depth,
        key_blocks=key.blocks,
        text_bytes=key.text_bytes,
        hot_version=key.hot_version,
        by_affinity=key.by_affinity,
    )
