"""The session with a router over real gRPC: join, beat, come back, and forget what was lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from core.errors import Forbidden, InvalidRequest
from regional import rpc
from regional.node import session as session_module
from regional.node.ledger import Ledger
from regional.node.seams import Outbox
from regional.node.session import RouterSession
from regional.pb import node_pb2 as pb
from regional.rpc import NodeSession
from tests.regional.node.routers import SECRET, FakeRouter, fake_router


@dataclass
class User:
    """A front that answers each Reserve with a Failed."""

    opened: int = 0
    closed: int = 0
    outbox: Outbox | None = None
    heard: list[str] = field(default_factory=list)

    def session_opened(self, outbox: Outbox) -> None:
        self.opened += 1
        self.outbox = outbox
        outbox.send(pb.NodeMessage(cache_events=pb.CacheEvents(snapshot=True)))

    async def joined(self, times: int = 1) -> None:
        """Until this end knows of the session too: the router knows before."""
        async with asyncio.timeout(30):
            while self.opened < times:
                await asyncio.sleep(0.005)

    def session_closed(self, outbox: Outbox) -> None:
        assert outbox is self.outbox
        self.closed += 1

    def handle(self, message: pb.RouterMessage, outbox: Outbox) -> None:
        self.heard.append(message.reserve.attempt_id)
        failed = pb.Failed(attempt_id=message.reserve.attempt_id, stage="reserve")
        outbox.send(pb.NodeMessage(failed=failed))


def join(secret: bytes = SECRET) -> pb.NodeMessage:
    return pb.NodeMessage(join=pb.Join(wire=1, name="n", epoch="e", secret=secret.decode()))


@asynccontextmanager
async def dialling(
    address: str, user: User, *, secret: bytes = SECRET
) -> AsyncIterator[RouterSession]:
    session = RouterSession(
        address,
        user,
        join=lambda: join(secret),
        heartbeat=lambda: pb.NodeMessage(heartbeat=pb.Heartbeat(running=user.opened)),
        ledger=Ledger(1, lambda _: None),
    )
    running = asyncio.create_task(session.run())
    try:
        yield session
    finally:
        running.cancel()
        await asyncio.wait([running])


def test_a_node_joins_beats_and_answers() -> None:
    async def go() -> None:
        user = User()
        async with fake_router() as router, dialling(router.address, user):
            node = await router.node("n")
            await node.desk.until(lambda: len(node.desk.of("heartbeat")) >= 3)
            assert node.desk.messages[0].cache_events.snapshot, "the snapshot comes first"
            node.say(pb.RouterMessage(reserve=pb.Reserve(attempt_id="a.1")))
            assert (await node.desk.failed("a.1")).stage == "reserve"
        assert (user.opened, user.closed) == (1, 1)

    asyncio.run(go())


def test_a_heartbeat_can_be_sent_at_once() -> None:
    async def go() -> None:
        async with fake_router(heartbeat_s=60.0) as router, dialling(router.address, User()) as s:
            node = await router.node("n")
            await node.desk.until(lambda: len(node.desk.of("heartbeat")) == 1)
            s.beat()
            await node.desk.until(lambda: len(node.desk.of("heartbeat")) == 2)
            assert node.desk.of("heartbeat")[1].heartbeat.running == 1

    asyncio.run(go())


def test_a_restarted_router_is_joined_again(free_port: int) -> None:  # B26
    async def go() -> None:
        user = User()
        address = f"127.0.0.1:{free_port}"
        async with dialling(address, user):
            for round_ in range(1, 4):
                async with fake_router(address):
                    await user.joined(round_)
                async with asyncio.timeout(30):
                    while user.closed < round_:
                        await asyncio.sleep(0.01)
            assert (user.opened, user.closed) == (3, 3)

    asyncio.run(go())


def test_a_session_that_never_lasts_is_asked_for_ever_more_slowly() -> None:
    """Whatever evicts it at once will do so again."""

    async def go() -> None:
        user = User()
        async with fake_router() as router, dialling(router.address, user):
            began = asyncio.get_running_loop().time()
            for round_ in range(1, 4):
                await user.joined(round_)
                (await router.node("n")).session.end("the test wants so")
                await router.until(lambda: "n" not in router.nodes)
            await user.joined(4)
            # 0.2 + 0.4 + 0.8 s lie between them, not three times a tenth
            assert asyncio.get_running_loop().time() - began > 1.3

    asyncio.run(go())


def test_what_is_said_after_the_end_is_dropped() -> None:
    async def go() -> None:
        user = User()
        async with fake_router() as router, dialling(router.address, user):
            await user.joined()
            old = user.outbox
            (await router.node("n")).session.end("the test wants so")
            await user.joined(2)
            assert old is not None
            old.send(pb.NodeMessage(failed=pb.Failed(attempt_id="late")))
            again = await router.node("n")
            again.say(pb.RouterMessage(reserve=pb.Reserve(attempt_id="b.1")))
            await again.desk.failed("b.1")
            assert [one.failed.attempt_id for one in again.desk.of("failed")] == ["b.1"]

    asyncio.run(go())


def test_a_router_that_refuses_is_asked_again_slowly_or_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        async with fake_router() as router, dialling(router.address, User(), secret=b"wrong"):
            async with asyncio.timeout(30):
                while "forbidden" not in caplog.text:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)  # usual retries would have come by now
            assert caplog.text.count("refused: forbidden") == 1
        async with fake_router() as router:
            router.refuse = InvalidRequest("not now")
            async with dialling(router.address, User()):
                await router.until(lambda: len(router.joins) >= 2)
                router.refuse = None
                await router.node("n")

    monkeypatch.setattr(session_module, "REJECTED_RETRY_S", 60.0)
    asyncio.run(go())
    assert Forbidden.code in caplog.text


def test_a_router_that_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        user = User()
        async with fake_router() as router, dialling(router.address, user):
            await user.joined()
            outbox = user.outbox
            assert outbox is not None
            for number in range(20):  # in one turn of the loop: nothing can be written between
                outbox.send(pb.NodeMessage(failed=pb.Failed(attempt_id=str(number))))
            await user.joined(2)
            assert user.closed == 1

    monkeypatch.setattr(rpc, "MAX_UNSENT", 10)
    asyncio.run(go())


def test_a_goodbye_is_written_before_it_returns() -> None:
    async def go() -> None:
        user = User()
        async with fake_router() as router, dialling(router.address, user) as session:
            await user.joined()
            desk = (await router.node("n")).desk
            await session.leave("stopped", timeout_s=5.0)
            await desk.until(lambda: bool(desk.of("leaving")))
            assert desk.of("leaving")[0].leaving.reason == "stopped"

    asyncio.run(go())


def test_a_router_that_hangs_up_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """A world ends: its routers and nodes are told at the same moment."""

    async def go() -> None:
        user = User()
        async with fake_router() as router, dialling(router.address, user) as session:
            await user.joined()
            outbox = user.outbox
            assert outbox is not None
            for number in range(500):
                outbox.send(pb.NodeMessage(failed=pb.Failed(attempt_id=str(number))))
            (await router.node("n")).session.end("the router stops")
            await session.leave("stopped", timeout_s=5.0)
            assert user.closed == 1

    asyncio.run(go())
    assert "leaving without a word" not in caplog.text


def test_what_was_said_arrives_also_at_a_router_that_reads_slowly() -> None:
    """Heartbeats go on while it reads the last words: they must not break off what is on its
    way."""
    said = 100
    ready: Future[str] = Future()
    heard: list[str] = []

    class Slow(FakeRouter):
        def received(self, session: NodeSession, message: pb.NodeMessage) -> None:
            time.sleep(0.005)  # on a loop of its own: only this router is held up
            heard.append(message.failed.attempt_id or str(message.WhichOneof("body")))

    async def serve() -> None:
        async with fake_router(router=Slow()) as router:
            ready.set_result(router.address)
            await router.until(lambda: router.ends == ["n"])

    async def go() -> None:
        user = User()
        async with dialling(await asyncio.wrap_future(ready), user) as session:
            await user.joined()
            outbox = user.outbox
            assert outbox is not None
            for number in range(said):
                outbox.send(pb.NodeMessage(failed=pb.Failed(attempt_id=str(number))))
            leaving = asyncio.create_task(session.leave("stopped", timeout_s=30.0))
            while not leaving.done():
                session.beat()
                await asyncio.sleep(0.001)
            await leaving

    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(asyncio.run, serve())
        asyncio.run(go())
        serving.result(30)
    assert [one for one in heard if one.isdigit()] == [str(number) for number in range(said)]
    assert heard[-1] == "leaving"
