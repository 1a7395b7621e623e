"""One generation from an edge's point of view: route, open, fail over, relay. No web framework.

Before the first delta a retryable failure moves the request to the next candidate, the loser told
to drop it first; after it the caller has text, and a second answer would not match it, so the
failure is the end. A reader who shows nothing before the end (`unseen`) has no text yet: it is told
to begin anew, and the request is tried again, by the same region where there is no other.

A region's stream must end in `Done` or `Fault`. Closing the generator, or cancelling the task that
reads it, cancels the request in the region.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from core.config import Routing
from core.errors import (
    DeadlineExceeded,
    Draining,
    IncompleteStream,
    InternalError,
    NoCapacity,
    RegionUnavailable,
    RequestError,
    VersionSkew,
    from_fault,
)
from core.events import Accepted, Delta, Done, Event, Fault, Finish, Moved
from core.metrics import EdgeMetrics
from core.prefix import Chain, affinity_key, key_of, prompt_chain
from core.types import GenerateRequest, ModelName, NodeName, RegionName
from edge.hold import Group, Held, Hold
from edge.journal import Journal, Key
from edge.region_client import RegionClient
from edge.routing.learned import BytesPerToken
from edge.routing.placement import Asked, Reason, RouteDecision, choose
from edge.routing.regions import Regions
from edge.routing.rings import Rings

_log = logging.getLogger("skerry.gateway")

ATTEMPTS = 3
"""Regions that are tried for one request."""
RETURN_S = 30.0
"""How long a region that said it drains, and went, may be expected back."""
_ILL = (RegionUnavailable, IncompleteStream, InternalError, VersionSkew)
"""Failures that say something about a region's health; a full one is well."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request is served. Node fields are None until the region has placed it."""

    region: RegionName
    reason: Reason
    prefill: NodeName | None = None
    decode: NodeName | None = None
    node_reason: str = ""
    prompt_tokens: int = 0
    """As the region counted them; 0 until it has."""

    def on(self, event: Accepted | Moved) -> Place:
        counted = event.prompt_tokens if isinstance(event, Accepted) else self.prompt_tokens
        return replace(
            self,
            prefill=event.prefill,
            decode=event.decode,
            node_reason=event.reason,
            prompt_tokens=counted,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """The deltas, finishes and the Done that one read brought, never empty."""

    place: Place
    events: tuple[Delta | Finish | Done, ...]


@dataclass(frozen=True, slots=True)
class Anew:
    """What came before is void: the answer begins again."""


ANEW = Anew()

Residency = Callable[[str, ModelName], frozenset[RegionName] | None]
"""The regions that a namespace's requests for a model may see; None for all."""


@dataclass(frozen=True, slots=True)
class _Errand:
    """One request with what every attempt at it needs. `deadline` by the loop's clock."""

    request: GenerateRequest
    chain: Chain
    affinity: str | None
    allowed: frozenset[RegionName] | None
    deadline: float
    journal: Journal
    unseen: bool

    def left_s(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()


class Gateway:
    """`tasks` takes the cancel messages of requests whose readers are gone."""

    def __init__(
        self,
        *,
        clients: Mapping[RegionName, RegionClient],
        regions: Regions,
        rings: Rings,
        routing: Routing,
        fleet_key: bytes,
        metrics: EdgeMetrics,
        tasks: asyncio.TaskGroup,
        hold: Hold,
        residency: Residency = lambda _namespace, _model: None,
    ) -> None:
        self._clients = clients
        self._regions = regions
        self._rings = rings
        self._routing = routing
        self._fleet_key = fleet_key
        self._metrics = metrics
        self._tasks = tasks
        self._hold = hold
        self._residency = residency
        self._tokens = BytesPerToken()

    async def generate(
        self,
        request: GenerateRequest,
        *,
        affinity: str | None = None,
        journal: Journal | None = None,
        unseen: bool = False,
    ) -> AsyncGenerator[Batch | Held | Anew, None]:
        """Batches of one generation; the last event of the last batch is `Done`. Before the first
        batch, `Held` says where the request waits while every region is busy. `Anew` comes only
        to a reader that is `unseen`: its caller is shown nothing before the end.

        Raises RequestError, before the first batch or after it. The reader closes it (`aclosing`).
        """
        chain = prompt_chain(request, fleet_key=self._fleet_key)
        request = msgspec.structs.replace(
            request,
            route_chain=b"".join(chain.ids()),
            route_ends=(*chain.ends[1:], chain.text_bytes),
        )
        errand = _Errand(
            request=request,
            chain=chain,
            affinity=affinity,
            allowed=self._residency(request.namespace, request.model),
            deadline=asyncio.get_running_loop().time() + request.deadline_s,
            journal=journal or Journal(request.id, "-"),
            unseen=unseen,
        )
        group = Group(request.model, errand.allowed)
        if self._hold.crowded(group):
            busy: RequestError = NoCapacity(
                "every region is busy, and others wait already", retry_after_s=1.0
            )
        else:
            try:
                async with aclosing(self._once(errand)) as batches:
                    async for batch in batches:
                        yield batch
                return
            except _Refused as refused:
                busy = refused.error
        if request.reject_if_busy:
            raise busy
        async with aclosing(self._held(errand, group, busy)) as words:
            async for word in words:
                yield word

    async def _held(
        self, errand: _Errand, group: Group, busy: RequestError
    ) -> AsyncGenerator[Batch | Held | Anew, None]:
        """Wait in line, and try when the turn has come, until a region takes the request."""
        place = self._hold.join(group, errand.request.namespace, most_s=errand.left_s())
        if place is None:
            raise busy
        journal = errand.journal
        journal.held(place.now.position)
        try:
            while True:
                async with aclosing(place.turn(busy)) as words:
                    async for word in words:
                        yield word
                journal.turn()
                try:
                    async with aclosing(self._once(errand)) as batches:
                        async for batch in batches:
                            place.leave(served=True)
                            yield batch
                    return
                except _Refused as refused:
                    busy = refused.error
                    journal.refused_again()
        finally:
            place.leave(served=False)
            self._metrics.hold_seconds.observe(journal.held_s)

    async def _once(self, errand: _Errand) -> AsyncGenerator[Batch | Anew, None]:
        """The request at the regions, one after the other. Raises _Refused when they are full, or
        on their way back."""
        request, journal = errand.request, errand.journal
        try:
            decision, hot = self._route(errand)
        except RegionUnavailable as error:
            if self._returns(errand):
                raise _Refused(error) from None
            raise
        ids = errand.chain.ids()
        failure: RequestError | None = None
        left, again = [*decision.candidates], False
        for number in range(ATTEMPTS):
            if not left:
                break
            region = left.pop(0)
            reason = decision.reason if number == 0 else Reason.FAILOVER
            self._metrics.routes.labels(region, reason).inc()
            self._metrics.hot_prompts.inc(hot)
            sent = self._regions.sent(region, ids, decision.work_s(region))
            journal.tried(region, reason)
            begun = False
            try:
                async with aclosing(self._attempt(errand, Place(region, reason))) as batches:
                    async for batch in batches:
                        if not begun:
                            begun = True
                            self._regions.answered(sent)
                            journal.first()
                        last = batch.events[-1]
                        if isinstance(last, Done):
                            journal.ended("ok", last)
                            self._metrics.attempts.labels(region, "ok").inc()
                            prompt_tokens = last.usage.prompt_tokens
                            self._tokens.learn(
                                request.model, errand.chain.text_bytes, prompt_tokens
                            )
                        yield batch
                return
            except RequestError as error:
                journal.ended(error.code)
                self._metrics.attempts.labels(region, error.code).inc()
                if not begun:
                    self._regions.failed(sent, ill=isinstance(error, _ILL))
                if (begun and not errand.unseen) or not error.retryable:
                    raise
                if begun:
                    again = True
                    left = left or [region]
                    yield ANEW
                self._metrics.failovers.labels(region, error.code).inc()
                _log.warning(
                    "attempt failed id=%s region=%s reason=%s code=%s",
                    request.id,
                    region,
                    reason,
                    error.code,
                )
                # What a region said (no capacity, with its time) tells more than that the next
                # one is not there.
                if failure is None or not isinstance(error, RegionUnavailable):
                    failure = error
        assert failure is not None, "a decision has at least one candidate"
        if not again and (
            isinstance(failure, NoCapacity | Draining)
            or (isinstance(failure, RegionUnavailable) and self._returns(errand))
        ):
            raise _Refused(failure)
        raise failure

    def _returns(self, errand: _Errand) -> bool:
        """Whether a region that the request may go to has said that it drains, and is there or was
        a moment ago: it is being replaced, and its callers can wait for it."""
        return any(
            region.status is not None
            and region.status.draining
            and (region.age_s or 0.0) < RETURN_S
            and errand.request.model in region.configured
            and (errand.allowed is None or region.name in errand.allowed)
            for region in self._regions.view()
        )

    def _route(self, errand: _Errand) -> tuple[RouteDecision, bool]:
        """And whether its whole prompt is hot. Raises RegionUnavailable."""
        request, chain = errand.request, errand.chain
        view = self._regions.view()
        hot = self._regions.hot()
        key = key_of(chain, self._routing.depth, hot.ids)
        digest = key.digest
        if errand.affinity is not None:
            digest = affinity_key(
                errand.affinity, fleet_key=self._fleet_key, namespace=request.namespace
            )
        asked = Asked(
            model=request.model,
            walk=self._rings.of(view).walk(digest),
            text_bytes=key.text_bytes,
            by_affinity=errand.affinity is not None,
            ids=chain.ids(),
            ends=chain.ends[1:],
            bytes_per_token=self._tokens.of(request.model),
            hot=key.depth > self._routing.depth,
            allowed=errand.allowed,
            draws=(random.random(), random.random()),
        )
        decision = choose(view, asked, self._routing)
        errand.journal.chose(
            decision,
            Key(key.depth, key.blocks, key.text_bytes, hot.version, asked.by_affinity),
        )
        return decision, key.hot

    async def _attempt(self, errand: _Errand, place: Place) -> AsyncGenerator[Batch, None]:
        left_s = errand.left_s()
        if left_s <= 0:
            raise DeadlineExceeded("no time was left to ask a region")
        client = self._clients[place.region]
        traced = errand.journal.traced
        request = msgspec.structs.replace(
            errand.request, deadline_s=left_s, trace="" if traced is None else traced.header
        )
        stream = client.generate(request)
        unfinished = set(range(request.sampling.n))
        ended = False
        try:
            async for events in stream:
                place, shown, fault = _sort(place, events, unfinished, errand.journal)
                if shown:
                    ended = isinstance(shown[-1], Done)
                    if ended and unfinished:
                        raise IncompleteStream("the stream ended without a finish reason")
                    yield Batch(place, shown)
                if fault is not None:
                    ended = True
                    raise from_fault(fault)
                if ended:
                    return
            raise IncompleteStream("the region's stream stopped without its end")
        except RequestError:
            await stream.aclose()
            if not ended:
                await client.cancel(request.id)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            # The reader is gone and this frame may not wait: the message is sent by the group.
            if not ended:
                self._tasks.create_task(client.cancel(request.id))
            raise
        finally:
            await stream.aclose()


class _Refused(Exception):
    """Every region that was asked is full, or about to come back."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


def _sort(
    place: Place, events: Sequence[Event], unfinished: set[int], journal: Journal
) -> tuple[Place, tuple[Delta | Finish | Done, ...], Fault | None]:
    """What `events` say: the place after them, what the caller sees, and a fault that ends it.
    Choices that finish leave `unfinished`."""
    shown: list[Delta | Finish | Done] = []
    for event in events:
        if isinstance(event, Delta):
            shown.append(event)
        elif isinstance(event, Accepted | Moved):
            place = place.on(event)
            journal.placed(event)
        elif isinstance(event, Fault):
            return place, tuple(shown), event
        else:
            shown.append(event)
            if isinstance(event, Done):
                break
            unfinished.discard(event.choice)
    return place, tuple(shown), None
