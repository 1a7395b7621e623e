"""B23, and residency, while regions come and go: a gateway over in-memory regions, real time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from core.config import Routing
from core.errors import NoCapacity, NodeLost, RegionUnavailable, RequestError
from core.events import Done, Event
from core.metrics import EdgeMetrics
from core.prefix import prompt_chain
from core.status import Told
from core.types import GenerateRequest, ModelName, RegionName, RequestId
from edge.gateway import Batch, Gateway
from edge.hold import Hold
from edge.routing.regions import Regions
from edge.routing.rings import Rings
from tests.edge.fakes import END, MODEL, FakeRegion, accepted, delta, status_of, world_of

NAMES = ("eu", "us", "asia", "oz")
SHORT, LONG = "Hi", "a prompt well above the bound of short ones. " * 60
FLEET_KEY = b"k" * 16
BEAT_S = 0.2


class Mortal:
    """A RegionClient of a region that can die: its streams break, its status stream ends."""

    def __init__(self, name: str, chance: Random) -> None:
        self.name = name
        self.up = asyncio.Event()
        self.up.set()
        self.asked: list[GenerateRequest] = []
        self.refuses: RequestError | None = None
        self._chance = chance
        self._died = asyncio.Event()

    def die(self) -> None:
        self.up.clear()
        self._died.set()

    def rise(self) -> None:
        self._died = asyncio.Event()
        self.up.set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[Event], None]:
        self.asked.append(request)
        if self.refuses is not None:
            raise self.refuses
        for events in ([accepted(self.name)], [delta("a")], [delta("b")], [*END]):
            await asyncio.sleep(self._chance.uniform(0.0, 0.01))
            if not self.up.is_set():
                raise RegionUnavailable("gone") if events[0] == delta("a") else NodeLost("gone")
            yield list(events)

    async def cancel(self, request_id: RequestId) -> None:
        """It is not there any more, or has nothing to forget."""

    async def ping(self) -> float:
        raise RegionUnavailable("no way is measured in memory")

    async def statuses(self) -> AsyncGenerator[Told, None]:
        if not self.up.is_set():
            raise RegionUnavailable("gone")
        died = self._died
        while not died.is_set():
            yield status_of(self.name, epoch=str(id(died)))
            with suppress(TimeoutError):  # a region that says nothing for a while counts as silent
                async with asyncio.timeout(BEAT_S):
                    await died.wait()


class Fleet:
    def __init__(self, gateway: Gateway, regions: Regions, mortals: dict[str, Mortal]) -> None:
        self.gateway = gateway
        self.regions = regions
        self.mortals = mortals

    async def ask(
        self, number: int, *, prompt: str, namespace: str = "", affinity: str | None = None
    ) -> str:
        """How it ended: "answered", or the class of its error."""
        request = GenerateRequest(
            id=RequestId(f"r{number}"), model=MODEL, prompt=f"{number} {prompt}", seed=1,
            rendered_at=0, namespace=namespace, deadline_s=10.0,
        )  # fmt: skip
        last: Event | None = None
        try:
            async with aclosing(self.gateway.generate(request, affinity=affinity)) as batches:
                async for batch in batches:
                    if isinstance(batch, Batch):
                        last = batch.events[-1]
        except RequestError as error:
            return type(error).__name__
        return "answered" if isinstance(last, Done) else "cut short"


@asynccontextmanager
async def _fleet(tmp_path: Path, *, hold: int = 0, pinned: str = "") -> AsyncIterator[Fleet]:
    """`pinned`: the region, or regions with a space between, that namespace "pinned" may use."""
    chance = Random(23)
    mortals = {name: Mortal(name, chance) for name in NAMES}
    named = [FakeRegion(name, address="127.0.0.1:1") for name in NAMES]
    topology = world_of(tmp_path, *named).topology
    clients = {RegionName(name): one for name, one in mortals.items()}
    view = Regions(topology, topology.edge("here"), clients)
    allowed = frozenset(RegionName(name) for name in pinned.split())

    def residency(namespace: str, _: ModelName) -> frozenset[RegionName] | None:
        return allowed if namespace == "pinned" else None

    async with asyncio.TaskGroup() as tasks:
        reader = tasks.create_task(view.run())
        async with asyncio.timeout(30):
            while any(one.status is None for one in view.view()):
                await asyncio.sleep(0)
        gateway = Gateway(
            clients=clients,
            regions=view,
            rings=Rings(dict.fromkeys(clients, 100)),
            routing=Routing(),
            fleet_key=FLEET_KEY,
            metrics=EdgeMetrics(CollectorRegistry()),
            tasks=tasks,
            hold=Hold(limit=hold, wait_s=0.3, region_queue=8),
            residency=residency,
        )
        yield Fleet(gateway, view, mortals)
        reader.cancel()


async def test_nothing_vanishes_while_regions_come_and_go(tmp_path: Path) -> None:
    """Sent = answered + refused, and after it all is as before: no load is left behind, and a
    region that is back takes its part."""
    sent = 300
    async with _fleet(tmp_path) as fleet:

        async def churn() -> None:
            for name in NAMES * 2:
                one = fleet.mortals[name]
                one.die()
                await asyncio.sleep(0.06)
                one.rise()
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as group:
            killer = group.create_task(churn())
            asked = []
            for number in range(sent):
                prompt = (SHORT, LONG)[number % 2]
                asked.append(group.create_task(fleet.ask(number, prompt=prompt)))
                await asyncio.sleep(0.003)
            ends = Counter([await one for one in asked])
            await killer
        assert ends.total() == sent
        assert "cut short" not in ends
        assert ends["answered"] > 0.6 * sent
        assert set(ends) <= {"answered", "RegionUnavailable", "NodeLost"}
        for one in fleet.mortals.values():
            one.rise()
            one.asked.clear()
        async with asyncio.timeout(30):  # of the case
            while not all(one.usable for one in fleet.regions.view()):
                await asyncio.sleep(0.01)
            number = sent
            while not all(one.asked for one in fleet.mortals.values()):
                # Many at once: alone, each would go to the nearest region.
                at_once = [fleet.ask(number + one, prompt=LONG) for one in range(24)]
                number += len(at_once)
                assert set(await asyncio.gather(*at_once)) == {"answered"}
        assert all(one.sent_s < 30.0 for one in fleet.regions.view())


@pytest.mark.parametrize("state", ["dead", "full", "one dead, one full", "well"])
async def test_no_hop_of_a_pinned_tenant_leaves_its_set(tmp_path: Path, state: str) -> None:
    """Fail-over, hold queue, short and long prompts, affinity: with all its regions dead the
    request is refused, never carried elsewhere."""
    async with _fleet(tmp_path, hold=4, pinned="us oz") as fleet:
        us, oz = fleet.mortals["us"], fleet.mortals["oz"]
        if state != "well":
            full = NoCapacity("full", retry_after_s=0.25)
            us.refuses = full if state == "full" else RegionUnavailable("gone")
            oz.refuses = RegionUnavailable("gone") if state == "dead" else full
        ends = await asyncio.gather(
            *(
                fleet.ask(number, prompt=prompt, namespace="pinned", affinity=affinity)
                for number, (prompt, affinity) in enumerate(
                    [(prompt, to) for prompt in (SHORT, LONG) for to in (None, "a", "b")] * 4
                )
            )
        )
        assert ("answered" in ends) == (state == "well")
        assert us.asked or oz.asked
        assert not fleet.mortals["eu"].asked
        assert not fleet.mortals["asia"].asked
        assert await fleet.ask(99, prompt=LONG) == "answered"  # who is not pinned goes elsewhere


async def test_affinity_never_picks_a_region_that_is_gone(tmp_path: Path) -> None:
    async with _fleet(tmp_path) as fleet:
        ids = [f"session {number}" for number in range(12)]
        for number, one in enumerate(ids):
            assert await fleet.ask(number, prompt=SHORT, affinity=one) == "answered"
        fleet.mortals["eu"].die()
        async with asyncio.timeout(30):
            while fleet.regions.view()[0].usable:
                await asyncio.sleep(0.005)
        before = len(fleet.mortals["eu"].asked)
        assert before > 0
        for number, one in enumerate(ids):
            assert await fleet.ask(100 + number, prompt=SHORT, affinity=one) == "answered"
        assert len(fleet.mortals["eu"].asked) == before


def test_tenants_have_keys_of_their_own() -> None:
    """The same prompt of two tenants has two keys: nobody learns where another's prefix lies."""
    one = GenerateRequest(id=RequestId("r"), model=MODEL, prompt=LONG, seed=1, rendered_at=0)
    keys = {
        prompt_chain(replace(one, namespace=name), fleet_key=FLEET_KEY).hashes[2]
        for name in ("", "a", "b")
    }
    assert len(keys) == 3
