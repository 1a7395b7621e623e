"""What queued requests used comes into the ledger of who charged it: polled for or not, once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from core.batches import QueuedItem, Submission
from core.config_tenants import ANONYMOUS
from core.errors import InternalError, RegionUnavailable
from core.events import Delta, Done, Event, Fault, Finish
from core.types import FinishReason, ModelName, RegionName, Usage
from core.usage import UsageReader, UsageRecord
from edge.collector import Account, Collector
from edge.queue_client import HttpQueueClient
from edge.tenants.meter import limits_of
from regional.queue.http import QueueHttp
from regional.queue.kept import KeptQueue
from regional.queue.rules import Answered
from regional.queue.store import Store
from tests.edge.fakes import running_edge, world_of
from tests.edge.tenants.fakes import Bench, bench, caller, request
from tests.edge.test_workers_ai_batch import SAID, QueueRegion, submit

EU = RegionName("eu")
SECRET = "a-secret"
ANSWER: tuple[Event, ...] = (
    Delta(text="yes"),
    Finish(reason=FinishReason.STOP),
    Done(usage=Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=4)),
)
FAULT: tuple[Event, ...] = (Fault(code="deadline_exceeded", message="no room"),)


class Region:
    """A region's queue on a real socket. `at` is called with (method, before or after)."""

    def __init__(self, path: Path | None = None) -> None:
        self.kept = KeptQueue(Store(path))
        self.client: HttpQueueClient
        self.port = 0
        self.at: Callable[[str, str], Awaitable[None]] | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Region]:
        @web.middleware
        async def hooks(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self.at is None or not request.path.endswith("/owed"):
                return await handler(request)
            await self.at(request.method, "before")
            answer = await handler(request)
            if self.at is not None:
                await self.at(request.method, "after")
            return answer

        app = web.Application(middlewares=[hooks])
        http = QueueHttp(self.kept, check=lambda _: None, poke=lambda: None, body_bytes=1 << 20)
        app.add_routes(http.routes())
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as session:
            self.client = _client(session, self.port)
            yield self
        await runner.cleanup()
        await self.kept.close()


def _client(session: aiohttp.ClientSession, port: int) -> HttpQueueClient:
    return HttpQueueClient(EU, f"127.0.0.1:{port}", session, secret=SECRET.encode())


def _collector(one: Bench, region: Region) -> Collector:
    return Collector({EU: region.client}, one.budgets, one.folder / "collector.lock")


async def _hand_in(
    region: Region, one: Bench, number: int, name: str = "b1", *answers: tuple[Event, ...]
) -> None:
    """`number` requests, charged and queued, and answered already."""
    acme = caller(tokens_per_day=10_000)
    asked = [request(f"{name}-{i}", 5, 55) for i in range(number)]
    charge = await one.budgets.charge_day(acme, name, asked)
    items = tuple(
        QueuedItem(
            request=ask,
            account=msgspec.msgpack.encode(
                Account(tenant="acme", key="key1", day=charge.day, charged=tokens)
            ),
        )
        for ask, tokens in zip(asked, charge.tokens, strict=True)
    )
    await region.client.submit(
        Submission(
            id=name,
            namespace="acme",
            model=ModelName("tiny"),
            items=items,
            collector=one.budgets.ledger,
        )
    )
    jobs = await region.kept.claim(1000)
    for place, job in enumerate(jobs):
        said = answers[min(place, len(answers) - 1)] if answers else ANSWER
        await region.kept.end(job, Answered(said))


def _of_the_day(one: Bench) -> int:
    (day,) = limits_of(caller(tokens_per_day=10_000).tenant)
    return one.ledger.meter("acme", day, one.clock()).taken


def _lines(one: Bench) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in one.folder.glob("usage/*/*"))


async def test_a_batch_that_nobody_polls_is_in_the_ledger_and_settled(tmp_path: Path) -> None:
    async with Region().serving() as region, bench(tmp_path) as one:
        await _hand_in(region, one, 3, "b1", ANSWER, FAULT, ANSWER)
        assert _of_the_day(one) == 180
        collector = _collector(one, region)
        await collector.collect(EU)
        await collector.collect(EU)  # and finds nothing
        assert (_lines(one), _of_the_day(one)) == (3, 24)
        records = {record.id: record for record in one.records()}
        assert sorted(records) == ["b1-0", "b1-1", "b1-2"]
        whole, broken = records["b1-0"], records["b1-1"]
        assert (whole.tenant, whole.key, whole.region, whole.dialect) == (
            "acme", "key1", "eu", "batch",
        )  # fmt: skip
        assert (whole.complete, whole.prompt, whole.cached, whole.completion) == (True, 5, 4, 7)
        assert (broken.complete, broken.outcome, broken.prompt) == (False, "deadline_exceeded", 0)


async def test_what_was_estimated_too_low_is_charged_after_all(tmp_path: Path) -> None:
    """Found in a running world: a template's text was in no estimate, and the day fell behind."""
    long = (ANSWER[0], ANSWER[1], Done(usage=Usage(prompt_tokens=90, completion_tokens=50)))
    async with Region().serving() as region, bench(tmp_path) as one:
        await _hand_in(region, one, 2, "b1", long, ANSWER)
        await _collector(one, region).collect(EU)
        assert _of_the_day(one) == 140 + 12


async def test_an_answer_that_was_lost_is_asked_for_again_and_settled_once(
    tmp_path: Path,
) -> None:
    """The region has the word, or has it not; the edge cannot know which."""
    async with Region().serving() as region, bench(tmp_path) as one:
        collector = _collector(one, region)
        for number, moment in enumerate(("before", "after")):
            await _hand_in(region, one, 2, f"b{number}")

            async def cut(method: str, at: str, moment: str = moment) -> None:
                if (method, at) == ("POST", moment):
                    raise web.HTTPServiceUnavailable

            region.at = cut
            with pytest.raises(RegionUnavailable):
                await collector.collect(EU)
            region.at = None
            await collector.collect(EU)
        assert sorted(record.id for record in one.records()) == ["b0-0", "b0-1", "b1-0", "b1-1"]
        # Where the word of the region was lost nobody knows whether the day was given back: not.
        assert _of_the_day(one) == 2 * 12 + 2 * 60


async def test_what_was_told_meanwhile_is_settled_once(tmp_path: Path) -> None:
    """Another process of the ledger was faster; the day is its to set right."""
    async with Region().serving() as region, bench(tmp_path) as one:
        await _hand_in(region, one, 2)

        async def faster(method: str, at: str) -> None:
            if (method, at) == ("POST", "before"):
                told = await region.kept.written(one.budgets.ledger, ["b1-0"])
                assert told == ["b1-0"]

        region.at = faster
        await _collector(one, region).collect(EU)
        assert _of_the_day(one) == 60 + 12


async def test_a_router_that_is_started_again_owes_the_same(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    async with bench(tmp_path) as one:
        async with Region(path).serving() as region:
            await _hand_in(region, one, 3)
        async with Region(path).serving() as region:
            await _collector(one, region).collect(EU)
        async with Region(path).serving() as region:
            await _collector(one, region).collect(EU)
        assert (len(one.records()), _lines(one), _of_the_day(one)) == (3, 3, 36)


async def test_workers_of_one_edge_and_other_edges_do_not_count_twice(tmp_path: Path) -> None:
    async with (
        Region().serving() as region,
        bench(tmp_path / "a", owner="w1") as one,
        bench(tmp_path / "a", owner="w2") as sibling,
        bench(tmp_path / "b") as elsewhere,
    ):
        assert one.budgets.ledger == sibling.budgets.ledger != elsewhere.budgets.ledger
        await _hand_in(region, one, 40)
        await _hand_in(region, elsewhere, 5, "b2")
        collectors = [_collector(each, region) for each in (one, sibling, elsewhere)]
        await asyncio.gather(*(collector.collect(EU) for collector in collectors * 3))
        assert (len(one.records()), _lines(one), _of_the_day(one)) == (40, 40, 480)
        assert (len(elsewhere.records()), _lines(elsewhere), _of_the_day(elsewhere)) == (5, 5, 60)


async def test_what_cannot_be_written_stays_owed(tmp_path: Path) -> None:
    async with Region().serving() as region, bench(tmp_path) as one:
        await _hand_in(region, one, 1)
        (tmp_path / "usage").write_text("in the way")
        with pytest.raises(InternalError):
            await _collector(one, region).collect(EU)
        (tmp_path / "usage").unlink()
        (tmp_path / "collector.lock").unlink()
        (tmp_path / "collector.lock").mkdir()  # nor where nothing can be locked
        with pytest.raises(InternalError):
            await _collector(one, region).collect(EU)
        (tmp_path / "collector.lock").rmdir()
        await _collector(one, region).collect(EU)
        assert len(one.records()) == 1


_KILLED = """
import asyncio, sys
from pathlib import Path
import aiohttp
from tests.edge.tenants.fakes import bench
from tests.edge import test_collector as here

async def main() -> None:
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    async with bench(folder, owner=sys.argv[3]) as one, aiohttp.ClientSession() as session:
        region = here.Region()
        region.client = here._client(session, port)
        await here._collector(one, region).collect(here.EU)
        await region.kept.close()

asyncio.run(main())
"""


async def test_killed_anywhere_each_request_counts_once(tmp_path: Path) -> None:
    """A process dies before it was told, before and after the region took its word; then another
    one comes."""
    deaths = [("GET", "after"), ("POST", "before"), ("POST", "after"), None]
    async with Region().serving() as region, bench(tmp_path) as one:
        await _hand_in(region, one, 20)
        for number, death in enumerate(deaths):
            process = subprocess.Popen(
                [sys.executable, "-c", _KILLED, str(tmp_path), str(region.port), f"w{number}"]
            )

            async def kill(
                method: str,
                at: str,
                process: subprocess.Popen[bytes] = process,
                death: tuple[str, str] | None = death,
            ) -> None:
                if (method, at) == death:
                    process.kill()
                    await asyncio.to_thread(process.wait)

            region.at = kill
            code = await asyncio.to_thread(process.wait)
            assert (code == 0) == (death is None)
        assert sorted(record.id for record in one.records()) == sorted(f"b1-{i}" for i in range(20))
        assert await region.kept.owed(one.budgets.ledger) == []


async def test_over_http_nobody_polls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the request to the usage report, with nothing but an edge that is there."""
    monkeypatch.setattr("edge.collector.EACH_S", 0.01)
    async with QueueRegion("eu").serving() as eu:
        world = world_of(tmp_path, eu.fake, more="[tenants.anonymous]\ntokens_per_day = 250")
        space = world.topology.namespace_of(ANONYMOUS)
        async with running_edge(world) as edge:
            for _ in range(6):  # 94 are charged each time, and 79 of them given back
                name = await submit(edge, {"prompt": "hi", "max_tokens": 85})
                await eu.answer(SAID)
                async with asyncio.timeout(30):
                    while not await _told(eu, name, space):
                        await asyncio.sleep(0.005)
    assert [_tokens(record) for record in UsageReader().read(tmp_path / "usage")] == [15] * 6


async def _told(region: QueueRegion, name: str, namespace: str) -> bool:
    state = await region.kept.state(name, namespace)
    return state is not None and state.told


def _tokens(record: UsageRecord) -> int:
    return record.prompt + record.completion
