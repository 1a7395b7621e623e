"""Nodes whose plans differ hand KV over; a rank that dies takes its node out, and only that."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from regional.pb import node_pb2 as pb
from tests.regional.node.desk import answer_ids, done_of, fault_of, prefill, reserve, start, work
from tests.regional.node.processes import PROMPT, SPOKEN, World, ended, in_world
from tests.regional.node.routers import Joined

pytestmark = pytest.mark.world
SCRIPTED = "scripted = { layers = 4, kv_heads = 3, block_bytes = 6144, step_ms = 1.0 }"
"""Blocks of 24 slabs of 256 bytes."""


def idle(node: Joined) -> bool:
    beats = node.desk.of("heartbeat")
    return bool(beats) and beats[-1].heartbeat.blocks_used == 0


@pytest.mark.parametrize(
    ("reader", "writer", "copies"),
    [
        ("tp = 3", "pp = 2", 1),
        ("pp = 3", "tp = 6", 2),
        ("", "tp = 3, pp = 2", 1),
        ("tp = 6", "", 1),
    ],
)
def test_one_plan_reads_and_another_answers(
    tmp_path: Path, reader: str, writer: str, copies: int
) -> None:
    """`copies`: heads that several receiving ranks hold are sent to each of them."""

    async def test(world: World) -> None:
        async with world.node("reader") as (source, _), world.node("writer") as (target, _):
            given = work(PROMPT)
            target.say(reserve("a.1", given))
            ticket = (await target.desk.reserved("a.1")).ticket
            assert _wanted(ticket) == copies * 4 * 3
            source.say(prefill("a.1", given, ticket))
            target.say(start("a.1"))
            events = await target.desk.ended("a.1")
            assert answer_ids(events)[:-1] == SPOKEN
            assert done_of(events).timings.kv_bytes == 10 * 6144 * copies
            await source.desk.until(lambda: idle(source))
            await target.desk.until(lambda: idle(target))

    plans = [f"parallel = {{ {plan} }}" if plan else "" for plan in (reader, writer)]
    in_world(test, tmp_path, scripted=SCRIPTED, reader=plans[0], writer=plans[1])


def _wanted(ticket: pb.Ticket) -> int:
    """Heads of layers that the endpoints want, over all ranks."""
    return sum(one.layers * one.heads for one in ticket.endpoints)


def test_a_join_tells_the_plan_and_its_ranks(tmp_path: Path) -> None:
    """B18: what the KV of a token takes counts the copies of heads."""

    async def test(world: World) -> None:
        async with world.node("writer") as (_, front):
            (join,) = world.router.joins
            assert join.plan == "tp 6 × pp 2"
            assert [rank.part for rank in join.ranks] == [
                f"layers {layers}, KV heads {rank // 2}"
                for layers in ("0-1", "2-3")
                for rank in range(6)
            ]
            children = {child.pid for child in psutil.Process(front.pid).children()}
            assert {rank.pid for rank in join.ranks} == children
            assert join.models[0].kv_bytes_per_token == 2 * 6144 // 16

    in_world(test, tmp_path, scripted=SCRIPTED, writer="parallel = { tp = 6, pp = 2 }")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_several_ranks_dies(tmp_path: Path, number: signal.Signals) -> None:
    async def test(world: World) -> None:
        async with world.node("writer") as (writer, front):
            (join,) = world.router.joins
            pids = [rank.pid for rank in join.ranks]
            desk = writer.desk
            writer.say(start("a.1", work(PROMPT)))
            await desk.until(lambda: len(desk.outputs("a.1")) > 2)
            began = time.monotonic()
            os.kill(pids[1], number)
            fault = fault_of(await desk.ended("a.1"))
            assert (fault.code, fault.retryable) == ("node_lost", True)
            assert await ended(front) == 1
            assert time.monotonic() - began < 20
            assert desk.of("leaving")
            assert not any(map(psutil.pid_exists, pids))
        lines = [line for line in world.log("writer").splitlines() if "rank 1 of node" in line]
        how = "was killed by SIGKILL" if number == signal.SIGKILL else "was silent for 3 s"
        assert [line for line in lines if how in line and "ERROR" in line] == lines[-1:]
        assert sum("ERROR" in line for line in world.log("writer").splitlines()) == 1

    slow = SCRIPTED.replace("step_ms = 1.0", "step_ms = 10.0, repeat = true")
    in_world(test, tmp_path, scripted=slow, writer="parallel = { pp = 2 }")


def test_a_killed_front_takes_all_ranks_along(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with world.node("writer") as (_, front):
            children = psutil.Process(front.pid).children()
            assert len(children) == 3
            front.kill()
            await ended(front)
            _, alive = psutil.wait_procs(children, timeout=30)
            assert not alive

    in_world(test, tmp_path, scripted=SCRIPTED, writer="parallel = { tp = 3 }")


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("tp = 2", "tp 2 does not divide 36 query and 3 KV heads; these do: 1, 3, 6, 9"),
        ("pp = 5", "pp 5 is more than the 4 layers"),
        ("ep = 3, tp = 3", "ep 3 needs experts, and the model has none"),
    ],
)
def test_a_plan_that_does_not_divide_is_one_line_and_status_2(
    tmp_path: Path, plan: str, says: str
) -> None:
    async def test(world: World) -> None:
        async with world.process("writer") as front:
            assert await ended(front) == 2
        (line,) = world.log("writer").splitlines()
        assert says in line

    in_world(test, tmp_path, scripted=SCRIPTED, writer=f"parallel = {{ {plan} }}")
