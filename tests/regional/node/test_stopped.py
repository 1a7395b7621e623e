"""A process that is stopped in the middle of a transfer, and wakes when everybody has given up: it
must not bring wrong bytes into anybody's blocks, over any transport. Real processes, real signals.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from core.kv.handoff import Failure
from core.kv.ticket import Ticket, new_ticket_id
from core.kv.transports.base import MOONCAKE, SHARED_MEMORY, TCP
from core.kv.transports.ways import Ways
from regional.node.receiving import OwnHost
from tests.regional.node.desk import answer_ids, prefill, reserve, start, work
from tests.regional.node.peers import BLOCKS, MODEL, REUSED, impatient, peer, pool, reuse
from tests.regional.node.processes import PROMPT, SPOKEN, World, in_world
from tests.servers import needed_mooncake

pytestmark = pytest.mark.world

LEASE_S = 2.0
"""Enough for whoever lives, on a machine that has much else to do."""


@pytest.fixture(params=[TCP, SHARED_MEMORY, MOONCAKE])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == MOONCAKE:
        needed_mooncake()
    return name


def test_a_source_that_wakes_after_its_lease_writes_nothing(kind: str) -> None:
    """The receiver has given the blocks to others meanwhile."""

    async def go() -> None:
        memory = pool()
        ways = Ways("127.0.0.1", (kind,), clock=time.monotonic)
        host = OwnHost(memory, ways.landing, MODEL, time.monotonic)
        fill = ({n: n for n in range(BLOCKS)},)
        over = asyncio.Event()
        ticket = Ticket(new_ticket_id(), 1, LEASE_S, tuple(host.endpoints(fill)))
        try:
            async with peer("source", kind) as source:  # it is up: the lease may run
                share = host.reserve(ticket, fill, over.set)
                assert await source.ask(f"open {msgspec.json.encode(ticket).decode()}") == ""
                assert await source.ask("send 0 4") == ""
                source.say("send 4 24")
                async with asyncio.timeout(30):
                    while (share.first_missing or 0) < 4:
                        await asyncio.sleep(0)
                    os.kill(source.process.pid, signal.SIGSTOP)
                    source.say("finish")
                    await over.wait()
                assert share.failure is Failure.EXPIRED
                freed = asyncio.Event()
                share.end(freed.set)
                assert freed.is_set()
                reuse(memory)
                os.kill(source.process.pid, signal.SIGCONT)
                heard = [await source.hear(), await source.hear()]
                assert any(heard), "it has to hear that it came too late"
                assert await source.ask("close") == ""
                assert not share.ready
                assert set(memory.ranks[0].view) == {REUSED}
        finally:
            ways.close()

    asyncio.run(go())


def test_a_receiver_that_wakes_never_takes_what_was_reused(kind: str) -> None:
    """The source has said all, its receiver stops as a piece begins; the source gives up and its
    blocks are written anew. The receiver's own lease still runs when it wakes, and what it was told
    to read lies in its socket."""
    stop_at = 9

    async def go() -> None:
        async with peer("receiver", kind) as receiver, peer("source", kind) as source:
            ticket = msgspec.convert(await receiver.ask(f"expect 30 {stop_at}"), Ticket)
            assert await source.ask(f"open {impatient(ticket, LEASE_S)}") == ""
            source.say(f"send 0 {BLOCKS}")
            source.say("finish")
            process = psutil.Process(receiver.process.pid)
            async with asyncio.timeout(30):
                while process.status() != psutil.STATUS_STOPPED:
                    await asyncio.sleep(0.005)
            gave_up = [await source.hear(), await source.hear()]
            assert any(gave_up), "nobody answers"
            assert await source.ask("close") == ""
            process.resume()
            end = await receiver.ask("outcome")
            assert end["wrong"] == []
            if kind == TCP:  # what is on its way was copied before the source gave up
                assert end["verified"] >= stop_at
            else:
                assert (end["ready"], end["failure"]) == (False, "peer_lost")
                assert 0 < end["verified"] <= stop_at

    asyncio.run(go())


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(SHARED_MEMORY),
        pytest.param(TCP, marks=pytest.mark.soak),
        pytest.param(MOONCAKE, marks=pytest.mark.soak),
    ],
)
def test_a_node_that_wakes_after_its_lease_spoils_no_answer(tmp_path: Path, ways: str) -> None:
    """Whole nodes with their ranks: the reader's front is stopped between two chunks."""
    if ways == MOONCAKE:
        needed_mooncake()

    async def test(world: World) -> None:
        async with world.node("reader") as (reader, front), world.node("writer") as (writer, _):
            writer.say(reserve("a.1", work(PROMPT)))
            ticket = (await writer.desk.reserved("a.1")).ticket
            assert ways in {offer.kind for one in ticket.endpoints for offer in one.offers}
            reader.say(prefill("a.1", work(PROMPT), ticket))
            beats = reader.desk.messages

            def reading() -> bool:
                return bool(beats) and 0 < beats[-1].heartbeat.prefill_backlog_tokens < 110

            await reader.desk.until(reading)
            os.kill(front.pid, signal.SIGSTOP)
            failed = await writer.desk.failed("a.1")
            assert "expired" in failed.message
            writer.say(start("b.1", work(PROMPT)))  # takes the blocks that were set aside
            assert answer_ids(await writer.desk.ended("b.1"))[:-1] == SPOKEN
            os.kill(front.pid, signal.SIGCONT)
            reader = await world.router.node("reader")
            if not reader.desk.of("failed"):
                await reader.desk.until(lambda: bool(reader.desk.of("heartbeat")))
            writer.say(start("c.1", work(PROMPT)))  # out of the cache
            assert answer_ids(await writer.desk.ended("c.1"))[:-1] == SPOKEN

    in_world(
        test,
        tmp_path,
        scripted="scripted = { prefill_tokens_per_s = 100.0 }\n[limits]\nlease_s = 2.0\n"
        "[routing]\nnetwork_trusted = true",
        reader=f'transports = ["{ways}"]\nmax_step_tokens = 16',
        writer=f'transports = ["{ways}"]',
    )


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_whoever_is_stopped_whenever_and_for_however_long(kind: str, seed: int) -> None:
    """The source reuses its blocks as soon as its part is over, one way or the other."""

    async def go() -> None:
        chance = random.Random(f"{kind} {seed}")
        async with peer("receiver", kind) as receiver, peer("source", kind) as source:
            ticket = msgspec.convert(await receiver.ask("expect 30 -1"), Ticket)
            assert await source.ask(f"open {impatient(ticket, LEASE_S)}") == ""
            source.say(f"send 0 {BLOCKS}")
            source.say("finish")
            source.say("close")
            receiver.say("outcome")
            await asyncio.sleep(chance.uniform(0, 0.02))
            who = chance.choice((receiver, source)).process.pid
            os.kill(who, signal.SIGSTOP)
            await asyncio.sleep(chance.choice((0.05, 2 * LEASE_S)))
            os.kill(who, signal.SIGCONT)
            told = [await source.hear() for _ in range(3)]
            end = await receiver.hear()
            assert end["wrong"] == []
            assert end["ready"] or any(told[:2]), "a transfer that failed is told to its source"

    asyncio.run(go())
