"""Two hundred requests while nodes die, fail and come back and clients leave: every request ends
with a name, and nothing stays counted (B23)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

from core.events import Accepted, Delta, Done, Event, Fault, Finish, Moved
from regional.pb import node_pb2 as pb
from tests.regional.fake_node import FakeNode
from tests.regional.fakes import Here, ask, delta, ending, region, run

NODES = (("p1", "prefill"), ("p2", "prefill"), ("d1", "decode"), ("d2", "decode"))
REQUESTS = 200


class Nodes:
    """Nodes that play their part, fail at random, and share the knowledge of what was handed
    over: a decode node answers once the prefill node has read the prompt."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._ready: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def react(self, node: FakeNode, message: pb.RouterMessage) -> None:
        match message.WhichOneof("body"):
            case "reserve":
                attempt = message.reserve.attempt_id
                if self._fails(node, attempt, "reserve"):
                    return
                node.reserved(attempt)
            case "prefill":
                attempt = message.prefill.attempt_id
                if self._fails(node, attempt, "transfer"):
                    return
                node.prefill_done(attempt)
                self._event(attempt).set()
            case "start":
                task = asyncio.create_task(self._decode(node, message.start))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _decode(self, node: FakeNode, start: pb.Start) -> None:
        if not start.HasField("work"):
            await self._event(start.attempt_id).wait()
        for number in range(self._dice.randrange(1, 6)):
            if self._fails(node, start.attempt_id, "decode"):
                return
            node.output(start.attempt_id, delta(f"{number} "))
            await asyncio.sleep(0)  # let the others speak
        node.output(start.attempt_id, *ending())

    def _fails(self, node: FakeNode, attempt: str, stage: str) -> bool:
        fails = self._dice.random() < 0.05
        if fails:
            code = self._dice.choice(["no_capacity", "internal_error", "transfer_failed"])
            node.failed(attempt, stage, code)
        return fails

    def _event(self, attempt: str) -> asyncio.Event:
        return self._ready.setdefault(attempt, asyncio.Event())

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _well_formed(events: list[Event]) -> str:
    """The outcome of a stream, which must be one of a whole generation or a named fault."""
    kinds = [type(event) for event in events]
    ends = [kind for kind in kinds if kind in (Done, Fault)]
    assert ends == [kinds[-1]]
    if kinds[0] is not Fault:
        assert kinds[0] is Accepted
    if Delta in kinds:
        assert Moved not in kinds[kinds.index(Delta) :]
    texts = [event.text for event in events if isinstance(event, Delta)]
    assert texts == [f"{number} " for number in range(len(texts))]  # one round of text (B22)
    if isinstance(events[-1], Fault):
        return events[-1].code
    assert kinds[-2:] == [Finish, Done]
    return "ok"


def test_storm(tmp_path: Path) -> None:
    dice = random.Random(20)
    outcomes: Counter[str] = Counter()

    async def one(here: Here, number: int) -> None:
        size = dice.choice([10, 100, 400, 1500])
        request = ask("x" * size, request_id=f"r{number}")
        if dice.random() < 0.15:
            async with here.stream(request) as stream:
                for _ in range(dice.randrange(3)):
                    event = await stream.next()
                    if isinstance(event, Done | Fault):
                        break
                stream.answer.close()
            outcomes["left"] += 1
        elif dice.random() < 0.1:
            async with here.stream(request) as stream:
                first = await stream.next()
                await here.cancel(request.id)
                outcomes[_well_formed([first, *await stream.rest()])] += 1
        else:
            outcomes[_well_formed(await here.events(request))] += 1

    async def churn(here: Here, nodes: Nodes, alive: dict[str, FakeNode]) -> None:
        for _ in range(30):
            name, role = dice.choice(NODES)
            await alive[name].die()
            alive[name] = await here.joined(name, role, nodes.react)
            for node in alive.values():
                node.beat()

    async def test() -> None:
        nodes = Nodes(dice)
        async with region(tmp_path, *NODES, queue=REQUESTS) as here:
            alive = {name: await here.joined(name, role, nodes.react) for name, role in NODES}
            async with asyncio.TaskGroup() as group:
                group.create_task(churn(here, nodes, alive))
                requests = [group.create_task(one(here, number)) for number in range(REQUESTS)]
                group.create_task(_beats(alive, requests))
            await here.until(here.at_rest)
            assert here.app.router.dispatcher.queued == 0
            await nodes.close()

    run(test())
    assert outcomes.total() == REQUESTS
    assert outcomes["ok"] >= REQUESTS // 2, outcomes
    assert outcomes["left"] > 0
    assert not outcomes.keys() - {
        "ok", "left", "cancelled", "node_lost", "internal_error", "transfer_failed",
        "region_unavailable", "no_capacity",
    }, outcomes  # fmt: skip


async def _beats(alive: dict[str, FakeNode], requests: list[asyncio.Task[None]]) -> None:
    """Heartbeats until all requests have ended."""
    while not all(request.done() for request in requests):
        for node in alive.values():
            node.beat()
        await asyncio.wait(requests, timeout=0.05)
