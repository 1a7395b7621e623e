"""The worker protocol with real processes: our driver on a scripted rank, and bad contestants."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from loadtest.bench import rounds
from loadtest.bench.figures import OURS
from loadtest.bench.rounds import Contestants, Limits
from loadtest.bench.workers import ContestantFailed, Worker
from loadtest.bench.workload import Mix, Request
from tests.tiny_text import write_tiny_folder

ROOT = Path(__file__).parents[3]


def scripted(tmp_path: Path, *options: str) -> Worker:
    folder = write_tiny_folder(tmp_path / "text")
    command = ["-m", "core.engine.drive", str(folder), "--engine", "scripted", *options]
    return start(tmp_path, command)


def start(
    tmp_path: Path, arguments: Sequence[str], start_s: float = 30.0, end_s: float = 5.0
) -> Worker:
    return Worker(
        [sys.executable, *arguments], env=os.environ, cwd=ROOT, log=tmp_path / "log",
        start_s=start_s, end_s=end_s,
    )  # fmt: skip


def test_the_driver_plays_requests_on_a_rank(tmp_path: Path) -> None:
    worker = scripted(tmp_path)
    try:
        worker.rest()
        with worker.turn():
            times = worker.play(
                [Request(0.1, (1, 2, 3), 2), Request(0.0, (4, 5, 6, 7), 3)], limit_s=20
            )
            assert worker.encode("the") != ()
            resident = worker.memory()
        assert [len(one) for one in times] == [2, 3]
        assert times[0][0] >= 0.1
        assert times[1][0] < times[0][0]
        assert all(one == sorted(one) for one in times)
        assert 0 <= resident.pool < resident.rss
        children = psutil.Process(worker.started.pid).parent().children(recursive=True)
    finally:
        worker.close()
    assert worker.started.pid in [child.pid for child in children]
    assert not any(child.is_running() for child in children)


def test_a_whole_round_without_peers(tmp_path: Path) -> None:
    said: list[str] = []
    worker = scripted(tmp_path, "--speculation", "off")
    group = Contestants({OURS: worker}, None, 200, said.append)
    try:
        rounds.rates(group, 0, (1, 8, 32), Limits(play_s=30))
        rounds.mixed(group, 0, Mix(count=4, per_second=1000.0), Limits(mixed_s=30))
        rounds.starts(group, lambda: scripted(tmp_path), Limits())
    finally:
        worker.close()
    assert set(group.samples) == {
        "decode 1", "decode 8", "decode 32", "prefill 1024", "mixed tokens/s", "mixed p99 ms",
        "start",
    }  # fmt: skip
    assert all(numbers[OURS][0] > 0 for numbers in group.samples.values())
    assert not group.failures


def test_a_refused_request_ends_the_contestant_and_not_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    worker = scripted(tmp_path, "--kv-tokens", "32")
    group = Contestants({OURS: worker}, None, 200, said.append)
    with group.bounded(OURS):
        group.play(OURS, [Request(0.0, (1,) * 100, 50)], 20)
    assert OURS not in group.workers
    assert "refused" in group.failures[OURS]


@pytest.mark.parametrize(
    ("code", "why", "start_s"),
    [
        ("import sys; sys.stderr.write('no such library'); sys.exit(3)", "no such library", 60.0),
        ("import time; time.sleep(60)", "no answer in", 1.0),
        ("print('hello', flush=True); input()", "something else than expected", 60.0),
        ('print(\'{"error": "no memory"}\', flush=True); input()', "no memory", 60.0),
    ],
)
def test_a_bad_start_is_told_and_leaves_no_process(
    tmp_path: Path, code: str, why: str, start_s: float
) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(ContestantFailed, match=why):
        start(tmp_path, ["-c", code], start_s=start_s)
    left = set(psutil.Process().children()) - before
    assert not [child for child in left if child.status() != "zombie"]


def test_a_contestant_at_rest_stands_still_and_can_be_closed(tmp_path: Path) -> None:
    spin = (
        'import os\nprint(\'{"ready_s": 1, "pid": %d, "vocab_size": 9}\' % os.getpid(),'
        " flush=True)\nwhile True: pass"
    )
    worker = start(tmp_path, ["-c", spin], end_s=0.1)
    process = psutil.Process(worker.started.pid)
    worker.rest()
    while process.status() != psutil.STATUS_STOPPED:
        pass
    with worker.turn():
        assert process.status() != psutil.STATUS_STOPPED
    worker.close()
    assert not process.is_running()
