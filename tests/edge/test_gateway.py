"""The gateway over in-memory regions: order of attempts, what is cancelled, what is raised."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from core.config import Routing
from core.errors import (
    DeadlineExceeded,
    IncompleteStream,
    InvalidRequest,
    NoCapacity,
    NodeLost,
    RegionUnavailable,
    RequestError,
)
from core.events import Done, Event, Finish
from core.metrics import EdgeMetrics
from core.prefix import prompt_chain
from core.types import FinishReason, GenerateRequest, RegionName, RequestId, Sampling
from edge.gateway import Batch, Gateway
from edge.hold import Hold
from edge.region_client import RegionClient
from edge.routing.breaker import FAILURES
from edge.routing.placement import Reason
from edge.routing.regions import Regions
from edge.routing.rings import Rings
from tests.edge.fakes import END, MODEL, USAGE, FakeRegion, MemoryRegion, accepted, delta, world_of

REQUEST = GenerateRequest(id=RequestId("r1"), model=MODEL, prompt="Hi", seed=1, rendered_at=0)


def _region(name: str, *steps: Event | RequestError) -> MemoryRegion:
    return MemoryRegion(name, lambda: steps)


@asynccontextmanager
async def _gateway(
    tmp_path: Path,
    *regions: MemoryRegion,
    residency: Mapping[str, str] = MappingProxyType({}),
    hold: int = 0,
) -> AsyncIterator[Gateway]:
    """Candidates come in the order given: a short prompt takes the nearest."""
    named = [FakeRegion(one.name, address="127.0.0.1:1") for one in regions]
    topology = world_of(tmp_path, *named).topology
    clients: dict[RegionName, RegionClient] = {RegionName(one.name): one for one in regions}
    view = Regions(topology, topology.edge("here"), clients)
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(view.run())
        async with asyncio.timeout(30):
            while any(one.status is None for one in view.view()):
                await asyncio.sleep(0)
        reader.cancel()
        yield Gateway(
            clients=clients,
            regions=view,
            rings=Rings(dict.fromkeys(clients, 100)),
            routing=Routing(),
            fleet_key=b"k" * 16,
            metrics=EdgeMetrics(CollectorRegistry()),
            tasks=tasks,
            hold=Hold(limit=hold, wait_s=2.0, region_queue=8),
            residency=lambda namespace, _: (
                frozenset({RegionName(residency[namespace])}) if namespace in residency else None
            ),
        )


async def _outcome(
    gateway: Gateway, request: GenerateRequest = REQUEST
) -> tuple[list[Batch], RequestError | None]:
    got: list[Batch] = []
    try:
        async with aclosing(gateway.generate(request)) as batches:
            async for batch in batches:
                assert isinstance(batch, Batch)
                got.append(batch)
    except RequestError as error:
        return got, error
    return got, None


async def test_the_loser_is_cancelled_first(tmp_path: Path) -> None:
    asked: list[str] = []
    eu, us = _region("eu", accepted("eu"), NodeLost("gone")), _region("us", delta("a"), *END)
    eu.order = us.order = asked
    async with _gateway(tmp_path, eu, us) as gateway:
        got, error = await _outcome(gateway)
    assert error is None
    assert asked == ["ask", "cancel", "ask"]
    assert (eu.cancelled, us.cancelled) == ([REQUEST.id], [])
    assert len(us.asked) == 1
    assert {(b.place.region, b.place.reason) for b in got} == {("us", Reason.FAILOVER)}


async def test_after_the_first_delta_a_failure_is_the_end(tmp_path: Path) -> None:
    eu = _region("eu", accepted("eu"), delta("a"), NodeLost("gone"))
    us = _region("us", accepted("us"), delta("a"), NodeLost("gone"))
    async with _gateway(tmp_path, eu, us) as gateway:
        got, error = await _outcome(gateway)
    assert isinstance(error, NodeLost)
    assert [b.events for b in got] == [(delta("a"),)]
    assert len(eu.asked) + len(us.asked) == 1


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ([], IncompleteStream),
        ([accepted("eu"), delta("a")], IncompleteStream),
        ([accepted("eu"), delta("a"), Done(usage=USAGE)], IncompleteStream),
        ([InvalidRequest("no")], InvalidRequest),
    ],
    ids=["nothing", "no-done", "no-finish", "refused"],
)
async def test_a_stream_must_end_in_done_or_fault(
    tmp_path: Path, steps: list[Event], kind: type[RequestError]
) -> None:
    async with _gateway(tmp_path, _region("eu", *steps)) as gateway:
        _, error = await _outcome(gateway)
    assert type(error) is kind


async def test_what_a_region_said_outweighs_that_another_is_gone(tmp_path: Path) -> None:
    full, gone = NoCapacity("full", retry_after_s=3), RegionUnavailable("gone")
    for pair in ((full, gone), (gone, full)):
        async with _gateway(tmp_path, _region("eu", pair[0]), _region("us", pair[1])) as gateway:
            _, error = await _outcome(gateway)
        assert error is full


async def test_nothing_follows_done(tmp_path: Path) -> None:
    eu = _region("eu", accepted("eu"), delta("a"), *END, delta("ghost"))
    async with _gateway(tmp_path, eu) as gateway:
        got, error = await _outcome(gateway)
    assert error is None
    assert isinstance(got[-1].events[-1], Done)
    assert eu.cancelled == []


async def test_a_choice_may_finish_before_the_others_go_on(tmp_path: Path) -> None:
    """Whatever one read brings together."""
    first, second = (Finish(choice=number, reason=FinishReason.STOP) for number in (0, 1))
    steps = (accepted("eu"), delta("a"), first, replace(delta("b"), choice=1), second, END[1])
    request = replace(REQUEST, sampling=Sampling(n=2))
    eu = _region("eu", *steps)
    for at_once in (False, True):
        eu.at_once = at_once
        async with _gateway(tmp_path, eu) as gateway:
            got, error = await _outcome(gateway, request)
        assert error is None
        assert [event for batch in got for event in batch.events] == list(steps[1:])


async def test_no_time_left(tmp_path: Path) -> None:
    eu = _region("eu", accepted("eu"), delta("a"), *END)
    async with _gateway(tmp_path, eu) as gateway:
        _, error = await _outcome(gateway, replace(REQUEST, deadline_s=0.0))
    assert isinstance(error, DeadlineExceeded)


async def test_a_reader_that_stops_cancels(tmp_path: Path) -> None:
    eu = _region("eu", accepted("eu"), delta("a"), delta("b"), *END)
    async with (
        _gateway(tmp_path, eu) as gateway,
        aclosing(gateway.generate(REQUEST)) as batches,
    ):
        await anext(batches)
    assert eu.cancelled == [REQUEST.id]


async def test_the_region_is_told_of_the_prompts_chain(tmp_path: Path) -> None:
    """What it counts and publishes; as much as the router needs to place it among the tokens."""
    eu = _region("eu", accepted("eu"), delta("a"), *END)
    request = replace(REQUEST, prompt="a long way round the island " * 100)
    async with _gateway(tmp_path, eu) as gateway:
        await _outcome(gateway, request)
    [asked] = eu.asked
    chain = prompt_chain(request, fleet_key=b"k" * 16)
    assert asked.route_chain == b"".join(chain.ids())
    assert asked.route_ends == (*chain.ends[1:], chain.text_bytes)


async def test_a_region_that_keeps_failing_is_left_alone_for_a_while(tmp_path: Path) -> None:
    eu = _region("eu", RegionUnavailable("gone"))
    us = _region("us", accepted("us"), delta("a"), *END)
    async with _gateway(tmp_path, eu, us) as gateway:
        for _ in range(FAILURES + 3):
            _, error = await _outcome(gateway)
            assert error is None
    assert len(eu.asked) == FAILURES
    assert len(us.asked) == FAILURES + 3


async def test_a_full_region_is_not_an_ill_one(tmp_path: Path) -> None:
    eu = _region("eu", NoCapacity("full", retry_after_s=1))
    us = _region("us", accepted("us"), delta("a"), *END)
    async with _gateway(tmp_path, eu, us) as gateway:
        for _ in range(FAILURES + 3):
            await _outcome(gateway)
    assert len(eu.asked) == FAILURES + 3


async def test_residency_holds_through_fail_over(tmp_path: Path) -> None:
    eu, us = _region("eu", RegionUnavailable("gone")), _region("us", accepted("us"), *END)
    async with _gateway(tmp_path, eu, us, residency={"acme": "eu"}) as gateway:
        _, error = await _outcome(gateway, replace(REQUEST, namespace="acme"))
        assert isinstance(error, RegionUnavailable)
        assert us.asked == []
        await _outcome(gateway)
    assert len(us.asked) == 1
