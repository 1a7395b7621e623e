"""The live view: freshness by our clock, epochs, cut streams."""

from __future__ import annotations

import asyncio
from pathlib import Path

from core.errors import RegionUnavailable
from core.status import STALE_S
from core.types import RegionName
from edge.region_client import RegionClient
from edge.routing.regions import Regions
from tests.edge.fakes import FakeRegion, MemoryRegion, running_edge, status_of, world_of


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class _Told(MemoryRegion):
    """Status frames come from a queue; None cuts the stream."""

    def __init__(self, name: str) -> None:
        super().__init__(name, list)
        self.frames: asyncio.Queue[object] = asyncio.Queue()

    async def statuses(self):  # type: ignore[no-untyped-def]  # the protocol types it
        while (status := await self.frames.get()) is not None:
            yield status
        raise RegionUnavailable("cut")


async def test_freshness_epochs_and_cuts(tmp_path: Path) -> None:
    clock, eu = _Clock(), _Told("eu")
    topology = world_of(tmp_path, FakeRegion("eu", address="127.0.0.1:1")).topology
    clients: dict[RegionName, RegionClient] = {RegionName("eu"): eu}
    regions = Regions(topology, topology.edge("here"), clients, clock=clock)

    async def told(*frames: object) -> None:
        for frame in frames:
            eu.frames.put_nowait(frame)
        while not eu.frames.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(regions.run())
        (view,) = regions.view()
        assert (view.fresh, view.status, view.age_s) == (False, None, None)
        await told(status_of("eu", sequence=5))
        (view,) = regions.view()
        assert view.fresh
        await told(status_of("eu", sequence=4))
        assert [one.sequence for one in regions.fresh_statuses()] == [5]
        await told(status_of("eu", sequence=1, epoch="e2"))
        assert [one.sequence for one in regions.fresh_statuses()] == [1]
        clock.now += STALE_S
        (view,) = regions.view()
        assert (view.fresh, view.age_s) == (False, STALE_S)
        assert list(regions.fresh_statuses()) == []
        await told(status_of("eu", sequence=2, epoch="e2"))
        assert regions.view()[0].fresh
        await told(None)
        assert not regions.view()[0].fresh
        eu.frames.put_nowait(status_of("eu", sequence=3, epoch="e2"))
        async with asyncio.timeout(30):
            while not regions.view()[0].fresh:
                clock.now += 0.05  # lost twice in a minute: it must be heard for a while
                await asyncio.sleep(0.01)
        reader.cancel()


async def test_round_trips_are_measured_not_only_written_down(tmp_path: Path) -> None:
    """The topology's figure until the first measurement; a failed one changes nothing."""

    class _Far(_Told):
        trips = iter((0.25, 0.2, None, 0.3))

        async def ping(self) -> float:
            trip = next(self.trips)
            if trip is None:
                raise RegionUnavailable("no answer")
            return trip

    eu = _Far("eu")
    topology = world_of(tmp_path, FakeRegion("eu", address="127.0.0.1:1")).topology
    regions = Regions(topology, topology.edge("here"), {RegionName("eu"): eu})
    assert regions.view()[0].round_trip_s == 0.01
    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(regions.run())
        seen: list[float] = []
        async with asyncio.timeout(30):
            while 0.2 not in seen:
                await asyncio.sleep(0.005)
                seen.append(regions.view()[0].round_trip_s)
        reader.cancel()
    assert set(seen) - {0.01} == {0.25, 0.2}


async def test_a_secret_that_does_not_fit_keeps_a_region_suspect(tmp_path: Path) -> None:
    async with FakeRegion("eu").serving() as eu:
        world = world_of(tmp_path, eu)
        (tmp_path / "region.secret").write_text("another-secret-altogether")
        async with running_edge(world, fresh=0) as edge:
            answer = await edge.http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
            page = (await edge.http.get("/status")).json()
    assert answer.status_code == 503
    assert "secret" in answer.json()["error"]["message"]
    assert "another" not in answer.text
    assert page["regions"][0]["state"] == "unknown"
