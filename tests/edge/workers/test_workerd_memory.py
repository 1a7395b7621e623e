"""What workerd keeps of requests that are over, with Cloudflare's own program."""

from __future__ import annotations

import asyncio
import http.client
import socket
from pathlib import Path

import psutil
import pytest

from core.config_workers import Workers
from core.errors import ConfigError, WorkerRefused
from edge.workers import tools
from edge.workers.bundle import Bundle, Module, Settings
from edge.workers.logs import LogBook
from edge.workers.pacer import Pacer
from edge.workers.runtime import Seat
from edge.workers.unit import Unit
from edge.workers.workerd import EMPTY_MB, Workerd

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


def unit_of(root: Path, code: bytes, limits: Workers) -> Unit:
    try:
        tools.install(lambda _: None)
    except ConfigError as error:
        pytest.skip(str(error))

    def seat(folder: Path, listener: int, control: Path) -> Seat:
        return Seat(
            name="w", folder=folder, listener=listener, control=control, edge="127.0.0.1:1",
            store=root / "store", token="t", mark="m", limits=limits,
        )  # fmt: skip

    settings = Settings(name="w", compatibility_date="2025-10-08")
    return Unit(
        version="v", tenant="t",
        bundle=Bundle(settings=settings, modules=(Module("worker.js", "esm", code),)),
        runtime=Workerd(), book=LogBook(), limits=limits, root=root, serial=1, seat=seat,
        changed=lambda: None, pacer=Pacer(),
    )  # fmt: skip


async def test_a_good_worker_does_not_fill_its_memory(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    unit = unit_of(tmp_path_factory.mktemp("v8"), WELL, Workers(memory_mb=1024))
    await unit.start()
    try:
        assert unit.pid is not None
        process = psutil.Process(unit.pid)
        empty = process.memory_info().rss
        assert empty / 1e6 < EMPTY_MB
        await asyncio.to_thread(ask, unit.socket, REQUESTS)
        grown_mb = (process.memory_info().rss - empty) / 1e6
    finally:
        await unit.close(1.0)
    assert grown_mb < MOST_MB, "and the limit of a Worker is 256 MB"


@pytest.mark.parametrize(
    "top",
    [
        b"const held = Array.from({length: 30}, () => new Uint8Array(1e7).fill(1));",
        b"const held = []; for (;;) held.push(new Uint8Array(1e7).fill(1));",
        b"const held = []; for (;;) held.push({a: [held.length]});",
    ],
)
async def test_what_it_takes_at_its_top_is_limited_as_well(
    tmp_path_factory: pytest.TempPathFactory, top: bytes
) -> None:
    code = top + b"globalThis.held = held;" + WELL
    unit = unit_of(tmp_path_factory.mktemp("v8"), code, Workers(memory_mb=128))
    try:
        with pytest.raises(WorkerRefused, match="filled its memory at its top"):
            await unit.start()
    finally:
        await unit.close(0.0)
