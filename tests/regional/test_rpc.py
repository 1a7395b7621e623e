"""Sessions over real gRPC: who is let in, who is lost, and what the channel bears."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.events import Fault
from core.types import PoolId
from regional.pb import node_pb2 as pb
from regional.rpc import MAX_MESSAGE_BYTES, Keepalive, channel_options, server_options
from tests.regional.fake_node import FakeNode, attempt_of
from tests.regional.fakes import Here, ask, delta, ending, region, run


async def _rejected(node: FakeNode) -> str:
    await node.dial()
    code = (await node.got("rejected")).rejected.code
    await node.over.wait()
    assert node.unexpected == []  # a refusal is an answer, not a broken stream
    return code


def _joined(here: Here) -> list[str]:
    return [view.name for view in here.app.router.cluster.view().nodes]


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("secret", "not the secret of this region", "forbidden"),
        ("wire", 2, "version_skew"),
        ("name", "stranger", "invalid_request"),
        ("role", "prefill", "invalid_request"),
    ],
)
def test_refused_joins(tmp_path: Path, field: str, value: str | int, code: str) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            node = here.node("d1", "decode")
            setattr(node.join, field, value)
            assert await _rejected(node) == code
            assert _joined(here) == []

    run(test())


def test_a_stranger_cannot_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            node = here.node("d1", "decode")
            node.join.name, node.join.secret = "x" * 1_000_000, "not the secret of this region"
            assert await _rejected(node) == "forbidden"

    run(test())
    [line] = [one.getMessage() for one in caplog.records if "wrong secret" in one.getMessage()]
    assert len(line) < 200


def test_other_models_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            node = here.node("d1", "decode")
            node.join.models[0].name = "another"
            assert await _rejected(node) == "invalid_request"

    run(test())


def test_the_first_message_must_be_join(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            node = here.node("d1", "decode")
            node.first = pb.NodeMessage(heartbeat=pb.Heartbeat())
            assert await _rejected(node) == "invalid_request"

    run(test())


def test_welcome_names_the_interval(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode"), heartbeat_s=7.0) as here:
            node = here.node("d1", "decode")
            await node.dial()
            welcome = (await node.got("welcome")).welcome
            assert (welcome.wire, welcome.heartbeat_s) == (1, 7.0)
            assert _joined(here) == ["d1"]

    run(test())


def test_three_missed_heartbeats(tmp_path: Path) -> None:
    """B23: a frozen node holds its connection open and says nothing."""

    async def test() -> None:
        async with region(tmp_path, ("d1", "decode"), heartbeat_s=0.3) as here:
            node = await here.joined("d1", "decode")
            [fault] = (await here.events(ask()))[1:]
            assert isinstance(fault, Fault)
            assert (fault.code, fault.retryable) == ("node_lost", True)
            assert _joined(here) == []
            await node.over.wait()
            assert "heartbeats" in node.unexpected[0]

    run(test())


def test_a_node_that_joins_again_replaces_itself(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            old = await here.joined("d1", "decode")
            old.cache(1, snapshot=True, stored=b"h" * 16)
            await here.until(lambda: True)
            answer = here.asking(ask())
            await old.got("start")
            new = here.node("d1", "decode")  # the same process: it has dialled again
            await new.start()
            await old.over.wait()
            assert "joined again" in old.unexpected[0]
            start = (await new.got("start")).start  # the request moved to the new self
            new.output(start.attempt_id, delta("a"), *ending())
            assert (await answer)[-1] == ending()[-1]
            assert _joined(here) == ["d1"]
            assert here.app.router.index.size(PoolId(new.name)) == 0
            assert here.at_rest()

    run(test())


def test_another_process_of_the_same_name_waits_for_the_first_to_go(tmp_path: Path) -> None:
    """Two that evict each other would fight for ever."""

    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            holder = await here.joined("d1", "decode")

            def newcomer() -> FakeNode:
                node = here.node("d1", "decode")
                node.join.epoch, node.join.pid = "e2", 8
                return node

            refused = newcomer()
            await refused.dial()
            rejected = (await refused.got("rejected")).rejected
            assert rejected.code == "invalid_request"
            assert "'d1' is in use by pid 7" in rejected.message
            assert _joined(here) == ["d1"]
            assert not holder.over.is_set()
            await holder.die()
            await here.until(lambda: _joined(here) == [])
            await newcomer().start()
            assert _joined(here) == ["d1"]

    run(test())


def test_a_name_is_free_when_its_holder_has_gone_silent(tmp_path: Path) -> None:
    """A machine without power closes no connection: three heartbeats later it is gone."""

    async def test() -> None:
        async with region(tmp_path, ("d1", "decode"), heartbeat_s=0.2) as here:
            await here.joined("d1", "decode")
            async with asyncio.timeout(30):
                while _joined(here):
                    await asyncio.sleep(0.02)
            node = here.node("d1", "decode")
            node.join.epoch = "e2"
            await node.start()
            assert _joined(here) == ["d1"]

    run(test())


@pytest.mark.parametrize("frozen_s", [0.95, 1.5])
def test_a_router_that_was_frozen_does_not_blame_its_nodes(tmp_path: Path, frozen_s: float) -> None:
    """What they said while it stood still is read before any of them is called lost, also where it
    stood still hardly longer than they may be silent."""

    async def test() -> None:
        async with region(tmp_path, ("d1", "decode"), heartbeat_s=0.3) as here:
            node = await here.joined("d1", "decode")

            async def beat() -> None:
                while True:
                    node.beat()
                    await asyncio.sleep(0.1)

            beating = asyncio.create_task(beat())
            try:
                await asyncio.sleep(0.3)
                time.sleep(frozen_s)  # the router's loop stands still, and the node's with it
                await asyncio.sleep(0.6)
                assert _joined(here) == ["d1"]
                assert not node.over.is_set()
            finally:
                beating.cancel()

    run(test())


def test_leaving_and_draining_nodes_get_nothing_new(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode"), ("d2", "decode")) as here:
            first = await here.joined("d1", "decode")
            second = await here.joined("d2", "decode")
            first.beat(draining=True)
            await here.until(lambda: any(n.draining for n in here.app.router.cluster.view().nodes))
            for n in range(3):
                here.background.append(here.asking(ask(request_id=f"r{n}")))
                await second.got("start")
            second.say(pb.NodeMessage(leaving=pb.Leaving(reason="test")))
            await here.until(lambda: all(n.draining for n in here.app.router.cluster.view().nodes))
            [fault] = await here.events(ask(request_id="late"))
            assert isinstance(fault, Fault)
            assert fault.code == "region_unavailable"
            assert first.unread() == []

    run(test())


def test_nodes_that_go_without_a_word_are_counted(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode"), ("d2", "decode")) as here:
            polite = await here.joined("d1", "decode")
            polite.say(pb.NodeMessage(leaving=pb.Leaving(reason="test")))
            await here.until(lambda: any(n.draining for n in here.app.router.cluster.view().nodes))
            await polite.die()
            for _ in range(2):
                node = await here.joined("d2", "decode")
                await node.die()
                await here.until(lambda: not list(here.app.router.cluster.members()))
            async with here.client.get(f"{here.base}/metrics") as answer:
                page = await answer.text()
            lost = [one for one in page.splitlines() if one.startswith("skerry_router_lost_nodes_")]
            assert 'skerry_router_lost_nodes_total{node="d1"} 0.0' in lost
            assert 'skerry_router_lost_nodes_total{node="d2"} 2.0' in lost

    run(test())


def test_messages_over_four_mebibytes(tmp_path: Path) -> None:
    """B26: gRPC's own limit is 4 MiB; a snapshot of a large cache is more."""

    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            node = here.node("d1", "decode")
            node.join.models[0].blocks = 400_000
            await node.start()
            hashes = b"".join(n.to_bytes(16, "big") for n in range(400_000))
            assert len(hashes) > 6 << 20
            node.cache(1, snapshot=True, stored=hashes)
            node.beat(running=3)
            await here.until(
                lambda: any(m.beat.running == 3 for m in here.app.router.cluster.members())
            )
            assert here.app.router.index.size(PoolId(node.name)) == 400_000

    run(test())


def test_a_node_comes_back_to_a_restarted_session(tmp_path: Path) -> None:
    """B26: the same name serves again, three times in a row."""

    async def test() -> None:
        async with region(tmp_path, ("d1", "decode")) as here:
            for n in range(3):
                node = await here.joined("d1", "decode")
                answer = here.asking(ask(request_id=f"r{n}"))
                node.output(attempt_of(await node.got("start")), delta("a"), *ending())
                assert (await answer)[-1] == ending()[-1]
                await node.die()
            await here.until(lambda: _joined(here) == [])

    run(test())


def test_client_pings_are_never_below_the_servers_floor() -> None:
    """B26: both ends' numbers come from one setting."""
    for keepalive in (Keepalive(), Keepalive(interval_s=1.0), Keepalive(interval_s=300.0)):
        client, server = dict(channel_options(keepalive)), dict(server_options(keepalive))
        floor = server["grpc.http2.min_ping_interval_without_data_ms"]
        assert client["grpc.keepalive_time_ms"] > floor > 0
        for side in (client, server):
            assert side["grpc.max_send_message_length"] == MAX_MESSAGE_BYTES
            assert side["grpc.max_receive_message_length"] == MAX_MESSAGE_BYTES
    with pytest.raises(ConfigError):
        Keepalive(interval_s=0.0)
