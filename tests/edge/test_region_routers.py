"""A region with two routers, over real sockets: in turn, past those that are away, heard as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
from msgspec.structs import replace

from core.errors import Draining, IncompleteStream, RegionUnavailable
from core.events import Accepted, Event, Fault, Moved
from core.status import PromptTokens, RegionMore, RegionPrefixes, RegionStatus, Told
from core.types import GenerateRequest, RegionName, RequestId
from edge.region_client import HttpRegionClient, new_session
from edge.region_routers import ManyRouters, together
from edge.routing.cache import Digest
from tests.edge.fakes import END, MODEL, SECRET, Cut, FakeRegion, delta, status_of

REQUEST = GenerateRequest(id=RequestId("r1"), model=MODEL, prompt="Hi", seed=1, rendered_at=0)


@asynccontextmanager
async def _both(
    *fakes: FakeRegion, lives: list[AsyncExitStack] | None = None
) -> AsyncIterator[ManyRouters]:
    """`lives`: gets a stack for each router, whose closing ends it."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(new_session())
        clients = []
        for fake in fakes:
            life = await stack.enter_async_context(AsyncExitStack())
            await life.enter_async_context(fake.serving())
            if lives is not None:
                lives.append(life)
            name = RegionName("eu")
            clients.append(HttpRegionClient(name, fake.address, session, secret=SECRET.encode()))
        yield ManyRouters(clients)


async def _asked(routers: ManyRouters) -> list[Event]:
    async with aclosing(routers.generate(REQUEST)) as reads:
        return [event async for read in reads for event in read]


def _answering(name: str) -> FakeRegion:
    return FakeRegion(name, script=lambda _: [delta(name), *END])


async def test_they_answer_in_turn() -> None:
    async with _both(_answering("a"), _answering("b")) as routers:
        first = [(await _asked(routers))[1] for _ in range(4)]
        assert first == [delta("a"), delta("b"), delta("a"), delta("b")]


STOPS = Fault(code=Draining.code, message="stops", retryable=True)


@pytest.mark.parametrize("last", [Cut(), STOPS], ids=["cut", "draining"])
async def test_one_that_fails_before_a_delta_is_asked_again_elsewhere(last: Cut | Fault) -> None:
    async with _both(FakeRegion("a", script=lambda _: [last]), _answering("b")) as routers:
        events = await _asked(routers)
    assert isinstance(events[0], Accepted)  # one request, accepted once
    assert [type(event) for event in events[1:-3]] in ([], [Moved])
    assert events[-3:] == [delta("b"), *END]


async def test_nothing_moves_once_the_client_has_seen_something() -> None:
    cut = FakeRegion("a", script=lambda _: [delta("x"), Cut()])
    other = _answering("b")
    async with _both(cut, other) as routers:
        with pytest.raises(IncompleteStream):
            await _asked(routers)
        assert other.requests == []


async def test_what_the_last_one_says_counts() -> None:
    async with _both(*(FakeRegion(one, script=lambda _: [STOPS]) for one in "ab")) as routers:
        assert (await _asked(routers))[-1] == STOPS


async def _until(statuses: AsyncIterator[Told], active: int) -> RegionStatus:
    async with asyncio.timeout(30):
        async for told in statuses:
            if isinstance(told, RegionStatus) and told.active == active:
                return told
    raise AssertionError("it ended")


async def test_the_region_is_lost_when_none_is_heard_and_not_before() -> None:
    first, second = _answering("a"), _answering("b")
    first.tell(replace(status_of("eu"), active=1, epoch="one"))
    second.tell(replace(status_of("eu"), active=2, epoch="two"))
    lives: list[AsyncExitStack] = []
    async with (
        _both(first, second, lives=lives) as routers,
        aclosing(routers.statuses()) as statuses,
    ):
        both = await _until(statuses, 3)
        await lives[0].aclose()
        left = await _until(statuses, 2)
        assert left.epoch == both.epoch  # what is known of the region stays
        assert left.sequence > both.sequence
        assert [(await _asked(routers))[1] for _ in range(3)] == [delta("b")] * 3
        await lives[1].aclose()
        with pytest.raises(RegionUnavailable):
            await _until(statuses, 0)


def test_what_they_say_is_put_together() -> None:
    one = replace(
        status_of("eu"),
        queued=1,
        queue_s=0.5,
        more=RegionMore(prompts=PromptTokens(delivered=10)),
        draining=True,
    )
    two = replace(
        status_of("eu"), queued=2, queue_s=1.0, more=RegionMore(prompts=PromptTokens(delivered=20))
    )
    whole = together([one, two])
    assert (whole.queued, whole.queue_s, whole.more.prompts.delivered) == (3, 1.5, 30)
    assert not whole.draining
    assert whole.nodes == one.nodes


def test_what_either_has_read_is_held() -> None:
    digest = Digest()
    for router, one in enumerate((b"12345678", b"abcdefgh")):
        digest.take(
            RegionPrefixes(
                region=RegionName("eu"), epoch=str(router), version=1, added=one, router=router
            )
        )
    assert digest.holds(b"12345678")
    assert digest.holds(b"abcdefgh")
    digest.take(RegionPrefixes(region=RegionName("eu"), epoch="0", version=2, router=0))
    assert not digest.holds(b"12345678")
    assert digest.holds(b"abcdefgh")
