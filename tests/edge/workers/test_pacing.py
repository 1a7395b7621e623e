"""Who holds its thread on a crowded machine computes by slices, and is given back whole."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from edge.workers.cores import Machine, cores_here
from edge.workers.pacer import Pacer, _may_raise_priorities
from edge.workers.pacing import HOLDS_S, Hold, Look, Room

LOOPS = """
print("begun", flush=True)
while True: pass
"""
WAITS = """
import time
print("begun", flush=True)
while True:
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end: pass
    time.sleep(0.001)
"""


class Roomy(Room):
    def crowded(self, holding: int) -> bool:
        return False


CROWDED, ROOMY = Room(1), Roomy(1)
"""One core is too few for a loop and anybody else."""
linux = pytest.mark.skipif(sys.platform != "linux", reason="Workers are paced on Linux only")


def test_holding_is_computing_without_waiting() -> None:
    hold = Hold(Look(0.0, 0.0, 7))
    asked = 0

    def waits(count: int) -> int:
        nonlocal asked
        asked += 1
        return count

    for turn in (1, 2, 3):  # half of a core, as beside others
        hold.see(0.02 * turn, 0.01 * turn, lambda: waits(7))
    assert hold.holds
    hold.see(0.08, 0.04, lambda: waits(8))
    assert (hold.held_s, hold.holds) == (0.0, False), "it waited for something"
    hold.see(0.10, 0.05, lambda: waits(8))
    assert 0 < hold.held_s < HOLDS_S
    hold.see(0.12, 0.051, lambda: waits(8))
    assert hold.held_s == 0.0, "it hardly computed"
    assert asked == 5, "and was not asked for it"


@pytest.mark.parametrize(
    ("cores", "others", "holding", "crowded"),
    [
        (2, 0.0, 1, False),
        (2, 1.0, 1, True),
        (16, 8.0, 1, False),
        (16, 8.0, 5, True),
        (16, 15.0, 1, True),
        (1, 0.0, 1, True),
    ],
)
def test_a_crowd_is_what_leaves_the_others_too_little(
    cores: int, others: float, holding: int, crowded: bool
) -> None:
    room = Room(cores)
    for _ in range(30):  # whoever holds a thread is not one of the others
        room.see(1.0, others + 0.5, 0.5)
    assert room.crowded(holding) is crowded


def test_a_control_group_with_a_limit_is_what_there_is(tmp_path: Path) -> None:
    own, group = tmp_path / "own", tmp_path / "pod" / "edge"
    group.mkdir(parents=True)
    own.write_text("1:cpu:/else\n0::/pod/edge\n")
    (group / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (group / "cpu.max").write_text("50000 100000\n")
    cores = cores_here(tmp_path, own)
    assert (cores.count, cores.used_s()) == (0.5, 2.5)
    for limit in ("max 100000\n", "100000000 100000\n", "nonsense\n"):
        (group / "cpu.max").write_text(limit)
        assert isinstance(cores_here(tmp_path, own), Machine), limit
    (group / "cpu.max").write_text("50000 100000\n")
    for stat in ("user_usec 1 x\n", ""):
        (group / "cpu.stat").write_text(stat)
        assert isinstance(cores_here(tmp_path, own), Machine), "it does not tell"
    assert isinstance(cores_here(tmp_path, tmp_path / "absent"), Machine)


def test_a_machine_counts_who_computes() -> None:
    machine = Machine()
    assert machine.count == os.cpu_count()
    before, end = machine.used_s(), time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    assert machine.used_s() > before


class Child:
    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.process.stdout.readline()  # the interpreter's start holds its thread
        self.worker_pid = self.process.pid
        self.halted_s = 0.0

    def state(self) -> tuple[str, int]:
        return psutil.Process(self.worker_pid).status(), os.sched_getscheduler(self.worker_pid)


@contextmanager
def child(code: str) -> Iterator[Child]:
    one = Child(code)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.communicate()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.02)


async def paced(pacer: Pacer, one: Child, while_: Awaitable[None]) -> None:
    running = asyncio.create_task(pacer.run())
    pacer.join(one)
    try:
        await while_
    finally:
        pacer.leave(one)
        pacer.leave(one)
        running.cancel()
        await asyncio.wait({running})


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others hold the cores, a loop gets little of them and is one all the same."""
    monkeypatch.setattr("edge.workers.pacing.RUNS_SHARE", 0.01)


@linux
@pytest.mark.usefixtures("starved")
async def test_a_loop_on_a_crowded_machine_gets_slices() -> None:
    with child(LOOPS) as loop:
        await paced(Pacer(room=CROWDED), loop, until(lambda: loop.halted_s > 0.5))
        status, policy = loop.state()
        assert status != psutil.STATUS_STOPPED
        assert policy == os.SCHED_OTHER
        computes = psutil.Process(loop.worker_pid).cpu_times
        before = computes().user
        await until(lambda: computes().user > before)  # it goes on


@linux
@pytest.mark.parametrize(("code", "room"), [(LOOPS, ROOMY), (WAITS, CROWDED)])
async def test_nobody_else_is_halted(code: str, room: Room) -> None:
    with child(code) as one:
        await paced(Pacer(room=room), one, asyncio.sleep(0.7))
        assert one.halted_s == 0.0


@linux
@pytest.mark.usefixtures("starved")
async def test_where_no_class_may_be_changed_slices_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(_pid: int, _policy: int, _param: object) -> None:
        raise PermissionError

    monkeypatch.setattr("edge.workers.pacer._may_raise_priorities", lambda: True)
    monkeypatch.setattr(os, "sched_setscheduler", refuses)
    with child(LOOPS) as loop:
        await paced(Pacer(room=CROWDED), loop, until(lambda: loop.halted_s > 0.0))
        assert loop.state()[1] == os.SCHED_OTHER


@linux
@pytest.mark.parametrize(
    ("limit", "may"), [(resource.RLIM_INFINITY, True), (20, True), (19, False), (0, False)]
)
def test_who_may_raise_a_priority_again(
    limit: int, may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))
    monkeypatch.setattr("edge.workers.pacer.CAP_SYS_NICE", 63)  # a right that nobody has
    assert _may_raise_priorities() is may


@linux
@pytest.mark.usefixtures("starved")
async def test_who_ends_while_it_is_paced_disturbs_nobody() -> None:
    pacer = Pacer(room=CROWDED)
    with child(LOOPS) as first, child(LOOPS) as second:
        running = asyncio.create_task(pacer.run())
        for one in (first, second):
            pacer.join(one)
        await until(lambda: first.halted_s > 0.0)
        first.process.kill()
        first.process.wait()
        before = second.halted_s
        await until(lambda: second.halted_s > before)
        assert not running.done()
        pacer.join(first)  # it is gone
        for one in (first, second):
            pacer.leave(one)
        running.cancel()
        await asyncio.wait({running})
