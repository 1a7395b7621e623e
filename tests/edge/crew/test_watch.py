"""A worker that hangs is noticed; one that is slow to start, or was not asked, is let be."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from core.pauses import Pauses
from edge.crew.supervisor import Crew
from edge.crew.watch import Patience, Silence

RULE = Patience(every_s=2.0, silent_s=10.0, starting_s=120.0)

WORKER = """
import contextlib, os, signal, socket, sys
folder, number = sys.argv[1], sys.argv[-1]
path = f"{folder}/{number}.sock"
if os.path.exists(path):
    os.unlink(path)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()
with open(f"{folder}/pids", "a") as pids:
    pids.write(f"{os.getpid()}\\n")
while True:
    caller, _ = listener.accept()
    with contextlib.suppress(OSError):  # whoever asked has waited for long enough
        caller.recv(100)
        caller.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n")
    caller.close()
    with open(f"{folder}/asked", "a") as asked:
        asked.write(f"{os.getpid()}\\n")
"""


def _over(silence: Silence, turns: list[tuple[float, bool]]) -> list[float]:
    return [at for at, answered in turns if silence.asked(answered, at)]


def test_a_silence_is_over_after_its_time_since_the_last_answer() -> None:
    turns = [(2.0, True), *((4.0 + 4 * n, False) for n in range(4))]
    assert _over(Silence(RULE, 0.0), turns) == [12.0, 16.0]


def test_an_answer_ends_a_silence() -> None:
    turns = [(2.0, True), (6.0, False), (9.0, False), (10.0, True), (14.0, False), (18.0, False)]
    assert _over(Silence(RULE, 0.0), turns) == []


def test_a_worker_that_starts_has_more_time() -> None:
    turns = [(2.0 * n, False) for n in range(1, 62)]
    assert _over(Silence(RULE, 0.0), turns) == [120.0, 122.0]


def test_time_in_which_nobody_asked_is_no_silence() -> None:
    """The supervisor itself was stopped for an hour."""
    assert _over(Silence(RULE, 0.0), [(2.0, True), (3602.0, False), (3606.0, True)]) == []


def _lines(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def _until(path: Path, count: int, pid: int | None = None) -> list[int]:
    """The pids in `path` once there are `count`, of `pid` where it is given."""
    async with asyncio.timeout(30):
        while True:
            lines = [one for one in _lines(path) if pid in (None, one)]
            if len(lines) >= count:
                return lines
            await asyncio.sleep(0.02)


async def test_a_worker_that_hangs_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, held = os.pipe()
    crew = Crew(
        [sys.executable, "-c", WORKER, str(tmp_path)],
        1, tmp_path, ours, Pauses(0.01, 0.01, 1.0),
        Patience(every_s=0.05, silent_s=2.0, starting_s=60.0),
    )  # fmt: skip
    running = asyncio.create_task(crew.run())
    try:
        (first,) = await _until(tmp_path / "pids", 1)
        await _until(tmp_path / "asked", 2, first)
        os.kill(first, signal.SIGSTOP)
        _, second = await _until(tmp_path / "pids", 2)
        await _until(tmp_path / "asked", 12, second)
        crew.stop()
        assert await running == 0
    finally:
        os.close(ours)
        os.close(held)
    assert second != first
    assert _lines(tmp_path / "pids") == [first, second]
    said = [one.message for one in caplog.records if one.name == "skerry.crew"]
    assert len([line for line in said if "worker hangs, killing it worker=1" in line]) == 1
    assert any("worker ended worker=1 code=-9" in line for line in said)
