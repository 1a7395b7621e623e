"""What workerd keeps of requests that are over, with Cloudflare's own program."""

from __future__ import annotations

import asyncio
import http.client
import socket
from pathlib import Path

import psutil
import pytest

from core.config_workers import Workers
from core.errors import ConfigError
from edge.workers import tools
from edge.workers.bundle import Bundle, Module, Settings
from edge.workers.logs import LogBook
from edge.workers.pacer import Pacer
from edge.workers.runtime import Seat
from edge.workers.unit import Unit
from edge.workers.workerd import Workerd

WELL = b"export default { fetch: () => new Response('well') };"
REQUESTS, MOST_MB = 6_000, 100.0


class Line(http.client.HTTPConnection):
    """To a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("worker", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def ask(path: Path, count: int) -> None:
    line = Line(path)
    for _ in range(count):
        line.request("GET", "/")
        assert line.getresponse().read() == b"well"
    line.close()


async def test_a_good_worker_does_not_fill_its_memory(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    try:
        tools.install(lambda _: None)
    except ConfigError as error:
        pytest.skip(str(error))
    root = tmp_path_factory.mktemp("v8")
    limits = Workers(memory_mb=1024)

    def seat(folder: Path, listener: int, control: Path) -> Seat:
        return Seat(
            name="w", folder=folder, listener=listener, control=control, edge="127.0.0.1:1",
            store=root / "store", token="t", mark="m", limits=limits,
        )  # fmt: skip

    settings = Settings(name="w", compatibility_date="2025-10-08")
    unit = Unit(
        version="v", tenant="t",
        bundle=Bundle(settings=settings, modules=(Module("worker.js", "esm", WELL),)),
        runtime=Workerd(), book=LogBook(), limits=limits, root=root, serial=1, seat=seat,
        changed=lambda: None, pacer=Pacer(),
    )  # fmt: skip
    await unit.start()
    try:
        assert unit.pid is not None
        process = psutil.Process(unit.pid)
        empty = process.memory_info().rss
        await asyncio.to_thread(ask, unit.socket, REQUESTS)
        grown_mb = (process.memory_info().rss - empty) / 1e6
    finally:
        await unit.close(1.0)
    assert grown_mb < MOST_MB, "and the limit of a Worker is 256 MB"
