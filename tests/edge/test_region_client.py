"""The HTTP client of a region against real sockets: what becomes of each way to fail."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest
from aiohttp import web

from core.errors import IncompleteStream, RegionUnavailable, RequestError, VersionSkew
from core.events import Event
from core.types import GenerateRequest, RegionName, RequestId
from edge.region_client import HttpRegionClient, new_session
from tests.edge.fakes import END, MODEL, SECRET, Cut, FakeRegion, Hold, accepted, delta, status_of

REQUEST = GenerateRequest(id=RequestId("r1"), model=MODEL, prompt="Hi", seed=1, rendered_at=0)


async def _events(address: str, *, secret: str = SECRET) -> list[Event]:
    async with new_session() as session:
        client = HttpRegionClient(RegionName("eu"), address, session, secret=secret.encode())
        async with aclosing(client.generate(REQUEST)) as reads:
            return [event async for read in reads for event in read]


async def test_events_come_through() -> None:
    async with FakeRegion("eu", script=lambda _: [delta("a"), *END]).serving() as eu:
        assert await _events(eu.address) == [accepted("eu"), delta("a"), *END]
        assert eu.requests == [REQUEST]


async def _failure(address: str, *, secret: str = SECRET) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await _events(address, secret=secret)
    return caught.value


async def test_failures_have_names() -> None:
    assert type(await _failure("127.0.0.1:1")) is RegionUnavailable
    async with FakeRegion("eu", script=lambda _: [delta("a"), Cut()]).serving() as eu:
        assert type(await _failure(eu.address)) is IncompleteStream
        refused = await _failure(eu.address, secret="not-the-secret-at-all")
        assert type(refused) is RegionUnavailable
        assert "secret" in refused.message
        eu.refuses_with = 500
        assert type(await _failure(eu.address)) is RegionUnavailable


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/x-skerry-frames", "x-skerry-wire": "2"},
        {"content-type": "application/x-skerry-frames"},
        {"content-type": "text/html", "x-skerry-wire": "1"},
    ],
    ids=["newer", "none", "another-server"],
)
async def test_another_wire_is_version_skew(headers: dict[str, str]) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b"", headers=headers)

    app = web.Application()
    app.router.add_post("/internal/v1/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        assert type(await _failure(f"{host}:{port}")) is VersionSkew
    finally:
        await runner.cleanup()


async def test_cancel_never_raises() -> None:
    async with FakeRegion("eu").serving() as eu, new_session() as session:
        client = HttpRegionClient(RegionName("eu"), eu.address, session, secret=SECRET.encode())
        await client.cancel(RequestId("r9"))
        assert eu.cancels == ["r9"]
        gone = HttpRegionClient(RegionName("us"), "127.0.0.1:1", session, secret=b"x" * 16)
        await gone.cancel(RequestId("r9"))


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.region_client._LOOK_S", 0.2)
    monkeypatch.setattr("edge.region_stream.LOOK_S", 0.2)


@pytest.mark.usefixtures("looks_often")
async def test_an_edge_that_was_frozen_does_not_blame_its_regions() -> None:
    """Whoever wakes up reads what waits before it judges."""
    eu = FakeRegion("eu", script=lambda _: [Hold(asyncio.Event())], beat_s=None)
    async with eu.serving(), new_session() as session:
        client = HttpRegionClient(
            RegionName("eu"), eu.address, session, secret=SECRET.encode(), silence_s=1.3
        )

        async def generate() -> None:
            async with aclosing(client.generate(REQUEST)) as reads:
                _ = [read async for read in reads]

        async with aclosing(client.statuses()) as statuses:
            await anext(statuses)
            generating = asyncio.create_task(generate())
            next_status = asyncio.ensure_future(anext(statuses))
            await asyncio.sleep(0.2)
            time.sleep(1.8)  # frozen: no loop runs here
            await asyncio.sleep(0.1)
            eu.tell(status_of("eu", sequence=2))
            async with asyncio.timeout(30):
                await next_status
            await asyncio.sleep(0.5)  # other looks have passed
            assert not generating.done()
            generating.cancel()
            await asyncio.wait([generating])


@pytest.mark.usefixtures("looks_often")
async def test_a_region_that_falls_silent_is_left_and_a_slow_one_is_not() -> None:
    """B23: a stopped process keeps its connections; only its silence tells."""
    eu = FakeRegion("eu", script=lambda _: [Hold(asyncio.Event())], beat_s=None)
    async with eu.serving(), new_session() as session:
        client = HttpRegionClient(
            RegionName("eu"), eu.address, session, secret=SECRET.encode(), silence_s=0.5
        )

        async def generate() -> RequestError:
            with pytest.raises(RequestError) as caught:
                async with aclosing(client.generate(REQUEST)) as reads:
                    _ = [read async for read in reads]
            return caught.value

        # nobody listens to status: a quiet generation is only slow
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await generate()
        async with aclosing(client.statuses()) as statuses:
            await anext(statuses)
            # one frame came and then none, on either stream
            async with asyncio.timeout(30):
                assert type(await generate()) is RegionUnavailable
            with pytest.raises(RegionUnavailable):
                await anext(statuses)
