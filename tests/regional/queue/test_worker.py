"""The worker: runs what there is room for, gives way at once, loses nothing when it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from core.batches import BatchState
from core.errors import NoCapacity, to_fault
from core.events import Accepted, Delta, Done, Event, Finish, encode_frame, event_decoder
from core.types import FinishReason, GenerateRequest, NodeName, Usage
from regional.queue.kept import KeptQueue
from regional.queue.rules import MAX_TRIES, Room
from regional.queue.store import Store
from regional.queue.worker import Worker
from tests.regional.fakes import run
from tests.regional.queue.test_store import batch

END: tuple[Event, ...] = (
    Finish(reason=FinishReason.STOP),
    Done(usage=Usage(prompt_tokens=3, completion_tokens=1)),
)


@dataclass
class Region:
    """Serves what it is given once `gate` is open; `waiting` people want its room."""

    slots: int = 8
    waiting: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    began: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    most: int = 0
    script: Callable[[GenerateRequest], tuple[Event, ...]] = lambda request: (
        Delta(text=f"to {request.prompt}"),
        *END,
    )
    serving: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def look(self, held: int) -> Room:
        return Room(slots=self.slots, taken=self.serving, waiting=self.waiting, held=held)

    async def serve(
        self, request: GenerateRequest, write: Callable[[bytes], Awaitable[None]]
    ) -> None:
        self.began.append(request.id)
        self.serving += 1
        self.most = max(self.most, self.serving)
        try:
            await self._tell()
            await write(encode_frame(Accepted(prefill=None, decode=NodeName("d"), prompt_tokens=3)))
            await self.gate.wait()
            for event in self.script(request):
                await write(encode_frame(event))
        except asyncio.CancelledError:
            self.cut.append(request.id)
            raise
        finally:
            self.serving -= 1
            await self._tell()

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(met)


@asynccontextmanager
async def working(kept: KeptQueue, region: Region) -> AsyncIterator[Worker]:
    worker = Worker(kept, region, look=region.look, deadline_s=60.0)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.wait({task})


async def done(kept: KeptQueue, name: str = "b1") -> BatchState:
    async with asyncio.timeout(30):
        while (state := await kept.state(name, "")) is None or state.status != "done":
            await asyncio.sleep(0.01)
    return state


def texts(state: BatchState) -> list[str]:
    events = [tuple(event_decoder().feed(one.events)) for one in state.answers]
    return [one[0].text if isinstance(one[0], Delta) else type(one[-1]).__name__ for one in events]


def test_all_of_a_batch_within_its_share() -> None:
    async def test() -> None:
        kept, region = KeptQueue(Store(None)), Region()
        async with working(kept, region) as worker:
            await kept.add(batch(size=10))
            worker.poke()
            await region.until(lambda: region.serving == 4)  # half of eight
            assert worker.waiting == 10
            region.gate.set()
            state = await done(kept)
            assert texts(state) == [f"to x {i}" for i in range(10)]
            assert region.most == 4
        await kept.close()

    run(test())


def test_gives_way_at_once_and_comes_back() -> None:
    """Whoever waits for an answer does not wait for the queue, and nothing of it is lost."""

    async def test() -> None:
        kept, region = KeptQueue(Store(None)), Region()
        async with working(kept, region) as worker:
            await kept.add(batch(size=3))
            worker.poke()
            for times in range(1, MAX_TRIES + 1):  # it is no failure, however often
                await region.until(lambda: region.serving == 3)
                region.waiting = 1
                await region.until(lambda: region.serving == 0)
                assert sorted(region.cut) == sorted(["b1-0", "b1-1", "b1-2"] * times)
                region.waiting = 0
                worker.poke()
            region.gate.set()
            assert texts(await done(kept)) == ["to x 0", "to x 1", "to x 2"]
        assert len(region.began) == 3 * (MAX_TRIES + 1)
        await kept.close()

    run(test())


def test_a_worker_that_is_stopped_leaves_its_work_to_the_next() -> None:
    async def test() -> None:
        kept, region = KeptQueue(Store(None)), Region()
        async with working(kept, region) as worker:
            await kept.add(batch(size=2))
            worker.poke()
            await region.until(lambda: region.serving == 2)
        assert region.serving == 0
        again = Region()
        again.gate.set()
        async with working(kept, again):
            assert texts(await done(kept)) == ["to x 0", "to x 1"]
        await kept.close()

    run(test())


def test_what_fails_for_good_is_answered_so() -> None:
    async def test() -> None:
        kept, region = KeptQueue(Store(None)), Region()
        region.gate.set()
        tries: dict[str, int] = {}

        def script(request: GenerateRequest) -> tuple[Event, ...]:
            tries[request.id] = tries.get(request.id, 0) + 1
            if request.id == "b1-0" and tries[request.id] == 1:
                return (to_fault(NoCapacity("busy")),)
            if request.id == "b1-1":
                return (Delta(text="half"),)  # no end, ever: a bug of ours
            return (Delta(text="whole"), *END)

        region.script = script
        async with working(kept, region) as worker:
            await kept.add(batch(size=3))
            worker.poke()
            await region.until(lambda: tries.get("b1-2", 0) == 1)
            await region.until(lambda: tries.get("b1-0", 0) == 2)
            state = await kept.state("b1", "")
            assert state is not None
            assert state.status == "running"
        assert tries["b1-2"] == 1
        await kept.close()

    run(test())
