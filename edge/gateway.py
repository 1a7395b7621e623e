"""One generation from an edge's point of view: route, open, fail over, relay. No web framework.

Before the first delta a retryable failure moves the request to the next candidate, the loser told
to drop it first; after it the caller has text, and a second answer would not match it, so the
failure is the end. A region's stream must end in `Done` or `Fault`. Closing the generator, or
cancelling the task that reads it, cancels the request in the region.
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
    IncompleteStream,
    InternalError,
    RegionUnavailable,
    RequestError,
    VersionSkew,
    from_fault,
)
from core.events import Accepted, Delta, Done, Event, Fault, Finish, Moved
from core.metrics import EdgeMetrics
from core.prefix import Chain, affinity_key, key_of, prompt_chain
from core.types import GenerateRequest, ModelName, NodeName, RegionName
from edge.region_client import RegionClient
from edge.routing.learned import BytesPerToken
from edge.routing.placement import Asked, Reason, RouteDecision, choose
from edge.routing.regions import Regions
from edge.routing.ring import Ring

_log = logging.getLogger("skerry.gateway")

ATTEMPTS = 3
"""Regions that are tried for one request."""
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

    def on(self, event: Accepted | Moved) -> Place:
        return replace(self, prefill=event.prefill, decode=event.decode, node_reason=event.reason)


@dataclass(frozen=True, slots=True)
class Batch:
    """The deltas, finishes and the Done that one read brought, never empty."""

    place: Place
    events: tuple[Delta | Finish | Done, ...]


Residency = Callable[[str, ModelName], frozenset[RegionName] | None]
"""The regions that a namespace's requests for a model may see; None for all."""


class Gateway:
    """`tasks` takes the cancel messages of requests whose readers are gone."""

    def __init__(
        self,
        *,
        clients: Mapping[RegionName, RegionClient],
        regions: Regions,
        ring: Ring,
        routing: Routing,
        fleet_key: bytes,
        metrics: EdgeMetrics,
        tasks: asyncio.TaskGroup,
        residency: Residency = lambda _namespace, _model: None,
    ) -> None:
        self._clients = clients
        self._regions = regions
        self._ring = ring
        self._routing = routing
        self._fleet_key = fleet_key
        self._metrics = metrics
        self._tasks = tasks
        self._residency = residency
        self._tokens = BytesPerToken()

    def route(self, request: GenerateRequest, affinity: str | None) -> RouteDecision:
        """Raises RegionUnavailable."""
        return self._route(request, affinity, self._chain(request))

    def _chain(self, request: GenerateRequest) -> Chain:
        return prompt_chain(request, fleet_key=self._fleet_key)

    def _route(self, request: GenerateRequest, affinity: str | None, chain: Chain) -> RouteDecision:
        key = key_of(chain, self._routing.depth, self._regions.hot().ids)
        digest = key.digest
        if affinity is not None:
            digest = affinity_key(affinity, fleet_key=self._fleet_key, namespace=request.namespace)
        asked = Asked(
            model=request.model,
            walk=self._ring.walk(digest),
            text_bytes=key.text_bytes,
            by_affinity=affinity is not None,
            ids=chain.ids(),
            ends=chain.ends[1:],
            bytes_per_token=self._tokens.of(request.model),
            hot=key.depth > self._routing.depth,
            allowed=self._residency(request.namespace, request.model),
            draws=(random.random(), random.random()),
        )
        return choose(self._regions.view(), asked, self._routing)

    async def generate(
        self, request: GenerateRequest, *, affinity: str | None = None
    ) -> AsyncGenerator[Batch, None]:
        """Batches of one generation; the last event of the last batch is `Done`.

        Raises RequestError, before the first batch or after it. The reader closes it (`aclosing`).
        """
        chain = self._chain(request)
        decision = self._route(request, affinity, chain)
        ids = chain.ids()
        request = msgspec.structs.replace(
            request, route_chain=b"".join(ids), route_ends=(*chain.ends[1:], chain.text_bytes)
        )
        deadline = asyncio.get_running_loop().time() + request.deadline_s
        failure: RequestError | None = None
        for number, region in enumerate(decision.candidates[:ATTEMPTS]):
            reason = decision.reason if number == 0 else Reason.FAILOVER
            self._metrics.routes.labels(region, reason).inc()
            sent = self._regions.sent(region, ids, decision.work_s(region))
            begun = False
            try:
                attempt = self._attempt(request, Place(region, reason), deadline)
                async with aclosing(attempt) as batches:
                    async for batch in batches:
                        if not begun:
                            begun = True
                            self._regions.answered(sent)
                        last = batch.events[-1]
                        if isinstance(last, Done):
                            self._tokens.learn(
                                request.model, chain.text_bytes, last.usage.prompt_tokens
                            )
                        yield batch
                return
            except RequestError as error:
                if not begun:
                    self._regions.failed(sent, ill=isinstance(error, _ILL))
                if begun or not error.retryable:
                    raise
                self._metrics.failovers.labels(region, error.code).inc()
                _log.warning(
                    "attempt failed id=%s region=%s code=%s", request.id, region, error.code
                )
                # What a region said (no capacity, with its time) tells more than that the next
                # one is not there.
                if failure is None or not isinstance(error, RegionUnavailable):
                    failure = error
        assert failure is not None, "a decision has at least one candidate"
        raise failure

    async def _attempt(
        self, request: GenerateRequest, place: Place, deadline: float
    ) -> AsyncGenerator[Batch, None]:
        client = self._clients[place.region]
        left = deadline - asyncio.get_running_loop().time()
        stream = client.generate(msgspec.structs.replace(request, deadline_s=max(left, 0.0)))
        ended = False
        unfinished = set(range(request.sampling.n))
        try:
            while not ended:
                events = await _next(stream, deadline)
                place, shown, fault = _sort(place, events)
                unfinished -= {event.choice for event in shown if isinstance(event, Finish)}
                done = bool(shown) and isinstance(shown[-1], Done)
                if done and unfinished:
                    raise IncompleteStream("the region's stream ended without a finish reason")
                ended = done or fault is not None
                if shown:
                    yield Batch(place, shown)
                if fault is not None:
                    raise from_fault(fault)
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


async def _next(stream: AsyncGenerator[list[Event], None], deadline: float) -> list[Event]:
    try:
        async with asyncio.timeout_at(deadline):
            return await anext(stream)
    except TimeoutError as error:
        raise DeadlineExceeded("the answer was not complete within its deadline") from error
    except StopAsyncIteration:
        raise IncompleteStream("the region's stream stopped without its end") from None


def _sort(
    place: Place, events: Sequence[Event]
) -> tuple[Place, tuple[Delta | Finish | Done, ...], Fault | None]:
    """What `events` say: the place after them, what the caller sees, and a fault that ends it."""
    shown: list[Delta | Finish | Done] = []
    for event in events:
        if isinstance(event, Accepted | Moved):
            place = place.on(event)
        elif isinstance(event, Fault):
            return place, tuple(shown), event
        else:
            shown.append(event)
            if isinstance(event, Done):
                break
    return place, tuple(shown), None
