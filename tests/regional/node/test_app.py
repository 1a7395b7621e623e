"""The whole node, front and rank as real processes, before a router of the test's own."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from core.config import parse
from core.models.source import resolve_source
from core.orders import RETIRE
from core.types import FinishReason, Sampling
from regional.node.app import EXIT_RANK_LOST, NodeSetup, serve
from regional.node.rank_link import Patience
from tests.regional.node.desk import (
    abort,
    answer_ids,
    done_of,
    fault_of,
    finish_of,
    prefill,
    reserve,
    start,
    work,
)
from tests.regional.node.processes import (
    PROMPT,
    SOURCE,
    SPOKEN,
    TOPOLOGY,
    World,
    ended,
    in_world,
)
from tests.regional.node.routers import SECRET, Joined, fake_router

pytestmark = pytest.mark.world


async def rank_of(process: asyncio.subprocess.Process) -> psutil.Process:
    (child,) = psutil.Process(process.pid).children()
    return child


def test_two_nodes_hand_over_and_answer(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with world.node("reader") as (reader, _), world.node("writer") as (writer, front):
            join = next(one for one in world.router.joins if one.name == "writer")
            assert join.pid == front.pid
            assert join.role == "decode"
            assert join.models[0].name == "m"
            given = work(PROMPT)
            writer.say(reserve("a.1", given))
            ticket = (await writer.desk.reserved("a.1")).ticket
            reader.say(prefill("a.1", given, ticket))
            writer.say(start("a.1"))
            events = await writer.desk.ended("a.1")
            assert answer_ids(events)[:-1] == SPOKEN
            assert finish_of(events) is FinishReason.STOP
            assert done_of(events).timings.kv_bytes == 10 * 4096
            assert done_of(events).usage.cached_tokens == 0
            done = await reader.desk.prefill_done()
            assert (done.computed_tokens, done.kv_bytes) == (149, 10 * 4096)

            writer.say(reserve("b.1", given))  # the same again: everything but the tail is there
            again = await writer.desk.reserved("b.1")
            assert again.cached_tokens == 144
            assert [len(one.blocks) for one in again.ticket.endpoints] == [1]
            reader.say(prefill("b.1", given, again.ticket))
            writer.say(start("b.1"))
            assert answer_ids(await writer.desk.ended("b.1"))[:-1] == SPOKEN

            writer.say(start("c.1", work(PROMPT, Sampling(max_tokens=5))))
            events = await writer.desk.ended("c.1")
            assert answer_ids(events) == SPOKEN[:5]
            assert done_of(events).usage.cached_tokens == 144

            def idle(node: Joined) -> bool:
                beats = node.desk.of("heartbeat")
                return bool(beats) and beats[-1].heartbeat.blocks_used == 0

            await reader.desk.until(lambda: idle(reader))
            await writer.desk.until(lambda: idle(writer))
            assert any(one.cache_events.stored for one in writer.desk.of("cache_events"))

    in_world(test, tmp_path)


def test_a_killed_rank_ends_the_front_with_one_line(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with world.node("writer") as (writer, front):
            desk = writer.desk
            writer.say(start("a.1", work(PROMPT)))
            await desk.until(lambda: len(desk.outputs("a.1")) > 2)
            rank = await rank_of(front)
            began = time.monotonic()
            rank.kill()
            fault = fault_of(await desk.ended("a.1"))
            assert (fault.code, fault.retryable) == ("node_lost", True)
            assert await ended(front) == 1
            assert time.monotonic() - began < 20
            assert desk.of("leaving")
        lines = [line for line in world.log("writer").splitlines() if "SIGKILL" in line]
        assert len(lines) == 1
        assert f"rank 0 of node writer (pid {rank.pid}) was killed by SIGKILL" in lines[0]

    in_world(test, tmp_path, scripted="scripted = { step_ms = 10.0, repeat = true }")


def test_a_killed_front_takes_its_rank_along(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with world.node("writer") as (_, front):
            rank = await rank_of(front)
            front.send_signal(signal.SIGKILL)
            await ended(front)
            psutil.wait_procs([rank], timeout=30)
            assert not rank.is_running()

    in_world(test, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, RETIRE])
def test_a_stop_signal_lets_answers_finish(tmp_path: Path, number: signal.Signals) -> None:
    async def test(world: World) -> None:
        async with world.node("writer") as (writer, front):
            desk = writer.desk
            writer.say(start("a.1", work(PROMPT)))
            await desk.until(lambda: len(desk.outputs("a.1")) > 2)
            rank = await rank_of(front)
            rank.suspend()  # so that the answer is not over before we have asked for another
            front.send_signal(number)
            await desk.until(lambda: desk.of("heartbeat")[-1].heartbeat.draining)
            writer.say(start("b.1", work(PROMPT)))
            assert (await desk.failed("b.1")).code == "draining"
            rank.resume()
            assert answer_ids(await desk.ended("a.1"))[:-1] == SPOKEN
            assert await ended(front) == 0
            await desk.until(lambda: bool(desk.of("leaving")))  # it may still be on its way
            assert not rank.is_running()

    in_world(test, tmp_path, scripted="scripted = { step_ms = 25.0 }")


def test_a_second_stop_signal_does_not_wait(tmp_path: Path) -> None:
    """What can go on elsewhere is given back from where it stands, the rest ends with a name."""

    async def test(world: World) -> None:
        async with world.node("writer") as (writer, front):
            desk = writer.desk
            writer.say(start("a.1", work(PROMPT)))
            writer.say(start("b.1", work(PROMPT, move=16)))
            await desk.until(lambda: min(len(desk.outputs(one)) for one in ("a.1", "b.1")) > 2)
            front.terminate()
            await desk.until(lambda: desk.of("heartbeat")[-1].heartbeat.draining)
            front.terminate()
            assert fault_of(await desk.ended("a.1")).code == "draining"
            await desk.until(lambda: bool(desk.of("preempted")))
            (left,) = [one.preempted for one in desk.of("preempted")]
            assert left.attempt_id == "b.1"
            assert list(left.token_ids) == answer_ids(desk.events("b.1"))
            assert await ended(front) == 0

    in_world(test, tmp_path, scripted="scripted = { step_ms = 10.0, repeat = true }")


def test_an_idle_node_stops_at_once_also_without_a_router(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.router.address = "127.0.0.1:1"
        async with world.process("writer") as front:
            async with asyncio.timeout(30):
                while "router at" not in world.log("writer"):
                    await asyncio.sleep(0.02)
            front.terminate()
            assert await ended(front) == 0

    in_world(test, tmp_path)


@pytest.mark.parametrize(
    ("scripted", "source", "says"),
    [
        ("scripted = { block_bytes = 1 }", SOURCE, "block_bytes"),
        ("", "package:no-such-package", "no-such-package"),
    ],
    ids=["the rank cannot load", "no such model"],
)
def test_what_the_operator_got_wrong_is_one_line_and_status_2(
    tmp_path: Path, scripted: str, source: str, says: str
) -> None:
    async def test(world: World) -> None:
        async with world.process("writer") as front:
            assert await ended(front) == 2
        last = world.log("writer").splitlines()[-1]
        assert last.startswith("node writer: ")
        assert says in last
        assert "Traceback" not in world.log("writer")

    in_world(test, tmp_path, scripted=scripted, source=source)


def test_a_rank_that_dies_while_it_loads_is_one_line_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    topology = parse(
        TOPOLOGY.format(source=SOURCE, scripted="", router="127.0.0.1:1", reader="", writer="")
    )
    setup = NodeSetup(
        node=topology.node("writer")[1],
        model=topology.models["m"],
        limits=topology.limits,
        secret=SECRET,
        source=resolve_source(SOURCE),
        routers=("127.0.0.1:1",),
        rank_command=(sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"),
    )
    assert asyncio.run(serve(setup)) == EXIT_RANK_LOST
    [line] = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert "rank 0 of node writer" in line
    assert "was killed by SIGKILL" in line


def test_a_rank_that_hangs_ends_the_front_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stopped process breaks no connection: what ends it is its silence."""
    scripted = "scripted = { step_ms = 10.0, repeat = true }"

    async def go() -> int:
        async with fake_router() as router:
            topology = parse(
                TOPOLOGY.format(
                    source=SOURCE, scripted=scripted, router=router.address, reader="", writer=""
                )
            )
            setup = NodeSetup(
                node=topology.node("writer")[1],
                model=topology.models["m"],
                limits=topology.limits,
                secret=SECRET,
                source=resolve_source(SOURCE),
                routers=(router.address,),
                patience=Patience(serving_s=3.0, look_s=0.1),
            )
            serving = asyncio.create_task(serve(setup))
            writer = await router.node("writer")
            desk = writer.desk
            writer.say(start("a.1", work(PROMPT)))
            await desk.until(lambda: len(desk.outputs("a.1")) > 2)
            rank = next(
                one for one in psutil.Process().children() if "core.engine.rank" in one.cmdline()
            )
            rank.suspend()
            fault = fault_of(await desk.ended("a.1"))
            assert (fault.code, fault.retryable) == ("node_lost", True)
            return await serving

    assert asyncio.run(go()) == EXIT_RANK_LOST
    [line] = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert "rank 0 of node writer" in line
    assert "was silent for 3 s" in line


def test_a_lost_session_aborts_in_the_rank_too(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        async with world.node("writer") as (writer, _):
            writer.say(start("a.1", work(PROMPT)))
            await writer.desk.until(lambda: len(writer.desk.outputs("a.1")) > 2)
            writer.session.end("the test wants so")
            await world.router.until(lambda: len(world.router.joins) == 2)
            again = await world.router.node("writer")
            assert world.router.joins[0].epoch == world.router.joins[1].epoch

            def idle() -> bool:
                beats = again.desk.of("heartbeat")
                return bool(beats) and not beats[-1].heartbeat.running

            await again.desk.until(idle)
            assert not again.desk.outputs("a.1")
            again.say(abort("a.1"))

    in_world(test, tmp_path, scripted="scripted = { step_ms = 10.0, repeat = true }")


def test_the_front_imports_no_torch() -> None:
    code = "import regional.node.app, sys; sys.exit('torch' in sys.modules)"

    async def go() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        return await process.wait()

    assert asyncio.run(go()) == 0
