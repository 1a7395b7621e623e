"""A pull, as the router conducts it: who is asked for the blocks, and when its reader goes on
without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.prefix import block_hashes, block_root
from regional.pb import node_pb2 as pb
from tests.regional.fake_node import FakeNode, work_of
from tests.regional.fakes import Here, ask, delta, ending, region, run

PROMPT = b"y" * 200
BLOCKS = b"".join(block_hashes(block_root(b"same", ""), list(PROMPT))[:12])


async def source_without_a_slot(here: Here) -> FakeNode:
    """It holds the prompt and cannot answer it."""
    node = await here.joined("d1", "decode")
    node.cache(1, snapshot=True, stored=BLOCKS)
    node.beat()
    await here.until(lambda: here.app.router.index.blocks == 12)
    for number in range(4):
        here.background.append(here.asking(ask("x", request_id=f"other{number}")))
        await node.got("start")
    return node


def pulling(attempt_id: str) -> pb.NodeMessage:
    ticket = pb.Ticket(id="a ticket", generation=3, lease_s=30.0)
    return pb.NodeMessage(pulling=pb.Pulling(attempt_id=attempt_id, ticket=ticket))


async def proceed_of(reader: FakeNode) -> pb.Proceed:
    """What its source had under way may be placed here meanwhile."""
    while True:
        (message,) = await reader.next(1)
        if message.HasField("proceed"):
            return message.proceed


@pytest.mark.parametrize("how", ["all", "lacking", "failed", "gone", "gone before"])
def test_the_reader_goes_on_when_nothing_more_will_come(tmp_path: Path, how: str) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode"), ("d2", "decode")) as here:
            source = await source_without_a_slot(here)
            reader = await here.joined("d2", "decode")
            answer = here.asking(ask(PROMPT.decode()))
            start = await reader.got("start")
            attempt_id = start.start.attempt_id
            assert work_of(start).pull_tokens == 12 * 16
            if how == "gone before":
                await source.die()
                await here.until(lambda: here.app.router.cluster.find(source.name) is None)
            reader.say(pulling(attempt_id))
            if how != "gone before":
                asked = (await source.got("send")).send
                assert (asked.attempt_id, asked.tokens) == (attempt_id, 12 * 16)
                assert asked.ticket.id == "a ticket"
            match how:
                case "all" | "lacking":
                    lacking = 32 if how == "lacking" else 0
                    sent = pb.Sent(attempt_id=attempt_id, lacking_tokens=lacking)
                    source.say(pb.NodeMessage(sent=sent))
                case "failed":
                    source.failed(attempt_id, "send")
                case "gone":
                    await source.die()
            if how == "all":
                source.beat(running=4)
                member = here.app.router.cluster.find(source.name)
                assert member is not None
                await here.until(lambda: member.beat.running == 4)  # it was heard
            else:
                assert (await proceed_of(reader)).attempt_id == attempt_id
            reader.output(attempt_id, delta("a"), *ending())
            await answer
            if how == "all":
                assert "proceed" not in reader.unread()

    run(test())


def test_a_client_that_leaves_ends_the_pull_at_its_source_too(tmp_path: Path) -> None:
    async def test() -> None:
        async with region(tmp_path, ("d1", "decode"), ("d2", "decode")) as here:
            source = await source_without_a_slot(here)
            reader = await here.joined("d2", "decode")
            answer = here.asking(ask(PROMPT.decode()))
            attempt_id = (await reader.got("start")).start.attempt_id
            reader.say(pulling(attempt_id))
            await source.got("send")
            answer.cancel()
            for node in (source, reader):
                assert (await node.got("abort")).abort.attempt_id == attempt_id

    run(test())
