"""Two routers of one region and the same nodes: real routers and sessions, answers by script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from core.events import encode_frame
from core.types import NodeName
from regional.cluster import NodeView
from regional.node.seams import Outbox
from regional.node.sessions import RouterSessions
from regional.pb import node_pb2 as pb
from tests.regional.fake_node import FakeNode
from tests.regional.fakes import Here, ask, delta, ending, region, run

NODES = (("d1", "decode"), ("d2", "decode"))


class Node:
    """Takes starts, and ends them when it is told to."""

    def __init__(self, name: str, routers: list[Here]) -> None:
        template = FakeNode(name, "decode", port=1, secret=routers[0].secret)
        self.name = NodeName(name)
        self.started: dict[str, Outbox] = {}
        self._join = template.join
        self.sessions = RouterSessions(
            [f"127.0.0.1:{here.app.grpc_port}" for here in routers],
            self,
            pools=1,
            join=lambda: pb.NodeMessage(join=self._join),
            heartbeat=lambda: pb.NodeMessage(heartbeat=pb.Heartbeat(running=len(self.started))),
        )

    def session_opened(self, outbox: Outbox) -> None:
        self.open = outbox

    def session_closed(self, outbox: Outbox) -> None:
        for attempt in [one for one, its in self.started.items() if its is outbox]:
            del self.started[attempt]

    def handle(self, message: pb.RouterMessage, outbox: Outbox) -> None:
        match message.WhichOneof("body"):
            case "start":
                self.started[message.start.attempt_id] = outbox
            case "abort":
                self.started.pop(message.abort.attempt_id, None)

    def finish(self) -> None:
        for attempt, outbox in self.started.items():
            frames = b"".join(map(encode_frame, (delta("a"), *ending())))
            said = pb.SequenceOutput(attempt_id=attempt, frames=frames, delta=True, last=True)
            outbox.send(pb.NodeMessage(step_output=pb.StepOutput(sequences=[said])))
        self.started.clear()


@asynccontextmanager
async def two_routers(tmp_path: Path) -> AsyncIterator[tuple[list[Here], list[Node]]]:
    """Heartbeats come every quarter of a minute, unless something moves."""
    async with AsyncExitStack() as stack:
        routers: list[Here] = []
        for name in ("one", "two"):
            folder = tmp_path / name
            folder.mkdir()
            (folder / "region.secret").write_text("a-secret-of-sixteen-characters")
            (folder / "region.secret").chmod(0o600)
            routers.append(
                await stack.enter_async_context(region(folder, *NODES, heartbeat_s=60.0))
            )
        nodes = [Node(name, routers) for name, _ in NODES]
        running = [asyncio.create_task(node.sessions.run()) for node in nodes]
        try:
            for here in routers:
                await here.until(partial(knows_both, here))
            yield routers, nodes
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def seen(here: Here, node: Node) -> NodeView:
    return next(one for one in here.app.router.cluster.view().nodes if one.name == node.name)


def load(here: Here, node: Node) -> tuple[int, int, int]:
    view = seen(here, node)
    return view.prefills, view.prefill_tokens, view.sequences


def knows_both(here: Here) -> bool:
    return len(here.app.router.cluster.view().nodes) == 2


def has_load(here: Here, node: Node, expected: tuple[int, int, int]) -> bool:
    return load(here, node) == expected


def carries(here: Here, nodes: tuple[Node, ...], sequences: int) -> bool:
    return sum(load(here, node)[2] for node in nodes) == sequences


async def same_load(routers: list[Here], node: Node, expected: tuple[int, int, int]) -> None:
    for here in routers:
        await here.until(partial(has_load, here, node, expected))


def test_each_sees_the_others_work_and_none_counts_twice(tmp_path: Path) -> None:
    async def test() -> None:
        async with two_routers(tmp_path) as (routers, (first, second)):
            one, two = routers
            answers = [one.asking(ask("x" * 40, request_id="a"))]
            await same_load(routers, first, (1, 40, 1))
            answers.append(two.asking(ask("x" * 30, request_id="b")))
            await same_load(routers, second, (1, 30, 1))  # it kept away from the busy one
            answers.append(two.asking(ask("x" * 20, request_id="c")))
            answers.append(one.asking(ask("x" * 20, request_id="d")))
            for here in routers:
                await here.until(partial(carries, here, (first, second), 4))
            assert load(one, first) == load(two, first)
            assert load(one, second) == load(two, second)
            first.finish()
            second.finish()
            for answer in await asyncio.gather(*answers):
                assert answer[-1] == ending()[-1]
            for node in (first, second):
                await same_load(routers, node, (0, 0, 0))

    run(test())


def test_a_full_node_is_full_to_both(tmp_path: Path) -> None:
    async def test() -> None:
        async with two_routers(tmp_path) as (routers, nodes):
            one, two = routers
            answers = [one.asking(ask("x", request_id=str(n))) for n in range(8)]
            for node in nodes:
                await same_load(routers, node, (4, 4, 4))
            late = two.asking(ask("x", request_id="late"))
            await two.queued(1)
            nodes[0].finish()  # its heartbeat tells the other router that there is room
            await two.queued(0)
            nodes[0].finish()
            nodes[1].finish()
            await two.until(lambda: load(two, nodes[0]) == (0, 0, 0))
            assert (await late)[-1] == ending()[-1]
            await asyncio.gather(*answers)

    run(test())


def test_the_work_of_a_router_that_dies_is_gone_for_the_other(tmp_path: Path) -> None:
    async def test() -> None:
        async with two_routers(tmp_path) as (routers, (first, second)):
            one, two = routers
            one.background.append(one.asking(ask("x" * 40, request_id="a")))
            await same_load(routers, first, (1, 40, 1))
            await one.app.stop()
            await two.until(lambda: load(two, first) == (0, 0, 0))
            assert first.started == {}
            answer = two.asking(ask("x" * 30, request_id="b"))
            await two.until(lambda: sum(load(two, n)[2] for n in (first, second)) == 1)
            while not first.started and not second.started:
                await asyncio.sleep(0)
            first.finish()
            second.finish()
            assert (await answer)[-1] == ending()[-1]

    run(test())
