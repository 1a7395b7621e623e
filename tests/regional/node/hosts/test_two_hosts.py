"""A decode node on two hosts, which are two groups of processes here: it joins once, receives KV on
both, and goes as a whole."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from core.config import load
from core.kv.transports.base import TCP_TLS
from core.tls import Credentials, Files
from deploy import certs
from regional.pb import node_pb2 as pb
from tests.regional.node.desk import (
    abort,
    answer_ids,
    done_of,
    fault_of,
    prefill,
    reserve,
    start,
    work,
)
from tests.regional.node.processes import PROMPT, SPOKEN, TOPOLOGY, World, ended, in_world
from tests.regional.node.routers import Joined

pytestmark = pytest.mark.world
SCRIPTED = "scripted = { layers = 4, kv_heads = 3, block_bytes = 6144, step_ms = 1.0 }"
SLOW = SCRIPTED.replace("step_ms = 1.0", "step_ms = 50.0, repeat = true")
READER, WRITER = "parallel = { tp = 3 }", "parallel = { pp = 2 }"


@dataclass
class TwoHosts:
    node: Joined
    first: asyncio.subprocess.Process
    second: asyncio.subprocess.Process


def free_ports() -> int:
    """The first of two ports, one after the other, below those that the system gives away."""
    for port in random.sample(range(20000, 30000, 2), 50):
        try:
            for one in (port, port + 1):
                socket.create_server(("127.0.0.1", one)).close()
        except OSError:
            continue
        return port
    raise AssertionError("no two ports in a row are free")


@asynccontextmanager
async def writer(world: World) -> AsyncIterator[TwoHosts]:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()), "WORLD_SIZE": "2"}
    async with (
        world.process("writer", **shared, RANK="1") as second,
        world.process("writer", **shared, RANK="0") as first,
    ):
        yield TwoHosts(await world.router.node("writer"), first, second)


def kv_of(pid: int) -> bytes:
    """What lies in a rank's shared KV memory."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if entry.readlink().name.startswith("memfd:skerry-kv"):
            return entry.read_bytes()
    raise AssertionError(f"rank {pid} has no KV memory")


def idle(node: Joined) -> bool:
    beats = node.desk.of("heartbeat")
    return bool(beats) and beats[-1].heartbeat.blocks_used == 0


def test_kv_lands_on_both_hosts_and_is_answered_from(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with world.node("reader") as (reader, _), writer(world) as hosts:
            node = hosts.node
            (join,) = [one for one in world.router.joins if one.name == "writer"]
            assert {one.name: one.scattered for one in world.router.joins} == {
                "reader": False, "writer": True,
            }  # fmt: skip
            parts = [(rank.rank, rank.part) for rank in join.ranks]
            assert parts == [(0, "layers 0-1, KV heads 0-2"), (1, "layers 2-3, KV heads 0-2")]
            fronts = [psutil.Process(one.pid) for one in (hosts.first, hosts.second)]
            assert [rank.pid for rank in join.ranks] == [
                child.pid for front in fronts for child in front.children()
            ]
            given = work(PROMPT)
            node.say(reserve("a.1", given))
            ticket = (await node.desk.reserved("a.1")).ticket
            assert len({one.address for one in ticket.endpoints}) == 2
            reader.say(prefill("a.1", given, ticket))
            node.say(start("a.1"))
            events = await node.desk.ended("a.1")
            assert answer_ids(events)[:-1] == SPOKEN
            assert done_of(events).timings.kv_bytes == 10 * 6144

            node.say(reserve("b.1", work(tuple(range(2000, 2100)))))
            await node.desk.reserved("b.1")
            node.say(abort("b.1"))  # both hosts must let go before the rank may reuse the blocks
            await node.desk.until(lambda: idle(node))
            node.say(start("c.1", given))
            assert answer_ids(await node.desk.ended("c.1"))[:-1] == SPOKEN

            assert all(any(kv_of(rank.pid)) for rank in join.ranks)
            node.say(pb.RouterMessage(purge=pb.Purge(id="p", namespace="")))
            await node.desk.until(lambda: bool(node.desk.of("purged")))
            assert node.desk.of("purged")[0].purged.error == ""
            assert not any(any(kv_of(rank.pid)) for rank in join.ranks)
            hosts.first.terminate()
            assert await ended(hosts.first) == 0
            assert await ended(hosts.second) == 0

    in_world(test, tmp_path, scripted=SCRIPTED, reader=READER, writer=WRITER)


def test_certificates_hold_for_both_hosts(tmp_path: Path) -> None:
    """Nothing of a hand-off is in the clear, and the second host takes the sender for who it is."""
    sealed = f"{SCRIPTED}\n[tls]\ninside = true"
    reader, writer_ = (f'{one}\ntransports = ["tcp"]' for one in (READER, WRITER))
    file = tmp_path / "certs.toml"
    fields = {"source": "x", "scripted": sealed, "router": "127.0.0.1:1"}
    file.write_text(TOPOLOGY.format(reader=reader, writer=writer_, **fields))
    certs.init(load(file, state=tmp_path), 1, lambda _: None)

    async def test(world: World) -> None:
        async with world.node("reader") as (reader, _), writer(world) as hosts:
            node = hosts.node
            node.say(reserve("a.1", work(PROMPT)))
            ticket = (await node.desk.reserved("a.1")).ticket
            ways = {(offer.kind, one.address) for one in ticket.endpoints for offer in one.offers}
            assert len(ways) == 2
            assert {kind for kind, _ in ways} == {TCP_TLS}
            reader.say(prefill("a.1", work(PROMPT), ticket))
            node.say(start("a.1"))
            events = await node.desk.ended("a.1")
            assert answer_ids(events)[:-1] == SPOKEN
            assert done_of(events).timings.kv_bytes == 10 * 6144

    mine = Credentials(Files.of(tmp_path / "certs", "r"))
    in_world(test, tmp_path, credentials=mine, scripted=sealed, reader=reader, writer=writer_)


@pytest.mark.parametrize(
    ("victim", "number", "why"),
    [
        ("rank", signal.SIGKILL, "rank 1 of node writer (pid {pid}) was killed by SIGKILL"),
        ("outpost", signal.SIGKILL, "host 1 of node writer hung up"),
        ("outpost", signal.SIGSTOP, "host 1 of node writer was silent for 3 s"),
        ("front", signal.SIGKILL, "the first host of node writer hung up"),
    ],
)
def test_whoever_dies_takes_the_node_down(
    tmp_path: Path, victim: str, number: signal.Signals, why: str
) -> None:
    async def test(world: World) -> None:
        async with writer(world) as hosts:
            desk = hosts.node.desk
            hosts.node.say(start("a.1", work(PROMPT)))
            await desk.until(lambda: len(desk.outputs("a.1")) > 2)
            (join,) = world.router.joins
            pids = {
                "rank": join.ranks[1].pid, "outpost": hosts.second.pid, "front": hosts.first.pid,
            }  # fmt: skip
            began = time.monotonic()
            os.kill(pids[victim], number)
            survivor = hosts.second if victim == "front" else hosts.first
            if victim != "front":
                assert fault_of(await desk.ended("a.1")).code == "node_lost"
            assert await ended(survivor) == 1
            assert time.monotonic() - began < 20
            if number == signal.SIGSTOP:
                os.kill(pids[victim], signal.SIGCONT)
            await asyncio.gather(ended(hosts.first), ended(hosts.second))
            ranks = [psutil.Process(one.pid) for one in join.ranks if psutil.pid_exists(one.pid)]
            assert not psutil.wait_procs(ranks, timeout=30)[1]
        wanted = why.format(pid=pids["rank"])
        lines = [line for line in world.log("writer").splitlines() if wanted in line]
        assert lines

    in_world(test, tmp_path, scripted=SLOW, writer=WRITER)
