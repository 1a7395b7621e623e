"""An edge of several real processes on one port."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.edge.fakes import SECRET, FakeRegion, chat, saying, world_of
from tests.edge.served import served

ROOT = Path(__file__).parents[3]
WORKERS = 2


class Lines:
    """What a process writes to stderr, as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.seen: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(process.stderr,))
        self._thread.start()

    def until(self, fits: Callable[[str], bool]) -> str:
        end = time.monotonic() + 60
        while True:
            line = self._lines.get(timeout=max(0.01, end - time.monotonic()))
            self.seen.append(line)
            if fits(line):
                return line

    def rest(self) -> str:
        self._thread.join(30)
        while not self._lines.empty():
            self.seen.append(self._lines.get())
        return "".join(self.seen)

    def _read(self, stream: Any) -> None:
        for line in stream:
            self._lines.put(line)


@contextmanager
def crew(folder: Path, region: str, listen: str = "127.0.0.1:0") -> Iterator[subprocess.Popen[str]]:
    world = world_of(folder, FakeRegion("eu", address=region))
    text = world.path.read_text().replace(
        'name = "here"', f'name = "here"\nlisten = "{listen}"\nworkers = {WORKERS}'
    )
    world.path.write_text(text)
    command = [sys.executable, "-m", "edge", "--topology", str(world.path)]
    process = subprocess.Popen(
        [*command, "--state", str(folder), "--name", "here"],
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=60, trust_env=False, verify=False)


def until(
    ask: Callable[[], httpx.Response], fits: Callable[[httpx.Response], bool]
) -> httpx.Response:
    """A worker that is too busy to answer another is left out of a page: asked again."""
    end = time.monotonic() + 60
    while not fits(answer := ask()):
        assert time.monotonic() < end, answer.text
    return answer


def all_workers(base: str) -> list[dict[str, Any]]:
    answer = until(lambda: get(f"{base}/status"), lambda one: len(one.json()["workers"]) == WORKERS)
    workers: list[dict[str, Any]] = answer.json()["workers"]
    return workers


def _ready(lines: Lines) -> str:
    return lines.until(lambda line: "edge ready" in line).rpartition("address=")[2].strip()


@pytest.mark.world
def test_several_workers_are_one_edge(tmp_path: Path) -> None:
    """One port, one page of metrics, one status; a dead worker comes back; the end is in order."""
    with (
        served(FakeRegion("eu", script=saying("a", "b"))) as region,
        crew(tmp_path, region) as process,
    ):
        lines = Lines(process)
        url = {f"http://{_ready(lines)}" for _ in range(WORKERS)}
        assert len(url) == 1
        (base,) = url
        while sum("region heard" in line for line in lines.seen) < WORKERS:
            lines.until(lambda line: "region heard" in line)  # one may have been before a ready

        ids = []
        for _ in range(12):  # a connection each: the kernel spreads them
            answer = httpx.post(
                f"{base}/v1/chat/completions", json=chat(), trust_env=False, timeout=60
            )
            assert answer.status_code == 200
            ids.append(answer.headers["x-request-id"])
        told_by = set()
        for name in ids:
            page = until(partial(get, f"{base}/explain/{name}"), lambda one: one.is_success)
            told_by.add(page.json()["stories"][0]["worker"])
        assert told_by == set(range(1, WORKERS + 1))
        until(lambda: get(f"{base}/explain"), lambda one: len(one.json()["stories"]) == 12)
        for _ in range(4):
            text = until(lambda: get(f"{base}/metrics"), lambda one: " 12.0" in one.text).text
            assert 'skerry_edge_requests_total{dialect="chat",outcome="ok"} 12.0' in text
            assert 'skerry_edge_region_up{region="eu"} 1.0' in text
            assert text.count('skerry_running_requests{region="eu"}') == 1

        workers = all_workers(base)
        assert [one["number"] for one in workers] == [1, 2]
        victim = workers[0]["pid"]
        os.kill(victim, signal.SIGKILL)
        lines.until(lambda line: "worker ended worker=1 code=-9" in line)
        assert get(f"{base}/healthz").status_code == 200
        _ready(lines)
        assert victim not in [one["pid"] for one in all_workers(base)]

        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        said = lines.rest()
        assert said.count("edge stopped") == WORKERS + 1
        assert SECRET not in said


@pytest.mark.world
def test_workers_end_with_their_supervisor(tmp_path: Path) -> None:
    with served(FakeRegion("eu")) as region, crew(tmp_path, region) as process:
        lines = Lines(process)
        base = {f"http://{_ready(lines)}" for _ in range(WORKERS)}.pop()
        workers = all_workers(base)
        process.kill()
        process.wait()
        end = time.monotonic() + 30
        while any(Path(f"/proc/{one['pid']}/stat").exists() for one in workers):
            assert time.monotonic() < end, "a worker outlived its supervisor"
            time.sleep(0.05)
        lines.rest()


def test_an_address_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        with crew(tmp_path, "127.0.0.1:1", taken) as process:
            assert process.wait(60) == 2
            assert process.stderr is not None
            assert process.stderr.read() == (
                f"edge here: {taken} cannot be listened on: Address already in use\n"
            )
