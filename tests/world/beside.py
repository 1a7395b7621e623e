"""One more edge beside a running world, whose ways to the regions can be cut and slowed down."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from msgspec.structs import replace

from core import config
from core.address import split_address
from deploy import toml_write
from deploy.launcher import LocalWorld
from tests.world.faults import until

ROOT = Path(__file__).parents[2]
_STATUS = b"GET /internal/v1/status"
_READY = re.compile(r"edge ready address=(\S+)")


@dataclass(eq=False)
class _Connection:
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    carries_status: bool = False


@dataclass
class Way:
    """A TCP proxy before one region, in a thread of its own. `delay_s`: what every piece from the
    region waits; `opened`: connections so far; `status_cut`: its status stream is broken and does
    not come back."""

    target: str
    address: str = ""
    delay_s: float = 0.0
    opened: int = 0
    status_cut: bool = False
    _loop: asyncio.AbstractEventLoop | None = None
    _connections: set[_Connection] = field(default_factory=set)
    _ending: asyncio.Event = field(default_factory=asyncio.Event)

    def cut_status(self) -> None:
        self.status_cut = True
        self._soon(self._cut)

    @contextmanager
    def open(self) -> Iterator[Way]:
        started = threading.Event()
        thread = threading.Thread(target=self._run, args=(started,))
        thread.start()
        try:
            assert started.wait(10)
            yield self
        finally:
            self._soon(self._ending.set)
            thread.join(10)

    def _soon(self, call: Callable[[], None]) -> None:
        assert self._loop is not None, "the way is open"
        self._loop.call_soon_threadsafe(call)

    def _run(self, started: threading.Event) -> None:
        async def serve() -> None:
            server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
            host, port = server.sockets[0].getsockname()
            self.address = f"{host}:{port}"
            started.set()
            await self._ending.wait()
            server.close()
            for one in tuple(self._connections):
                _close(one)
            while self._connections:
                await asyncio.sleep(0.01)

        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(serve())

    def _cut(self) -> None:
        for one in self._connections:
            if one.carries_status:
                _close(one)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = split_address(self.target)
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        one = _Connection((writer, far_writer))
        self.opened += 1
        self._connections.add(one)
        try:
            await asyncio.gather(
                self._pump(reader, far_writer, one, asked=True),
                self._pump(far_reader, writer, one, asked=False),
            )
        finally:
            self._connections.discard(one)
            _close(one)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        one: _Connection,
        *,
        asked: bool,
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                if asked and _STATUS in data:
                    one.carries_status = True
                    if self.status_cut:
                        break
                if not asked and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
        _close(one)


def _close(one: _Connection) -> None:
    for writer in one.writers:
        writer.close()


@dataclass(frozen=True)
class Beside:
    url: str
    ways: Mapping[str, Way]
    process: subprocess.Popen[str]

    def state(self, region: str) -> str:
        page = httpx.get(f"{self.url}/status", timeout=5, trust_env=False).json()
        return str(next(one["state"] for one in page["regions"] if one["name"] == region))


@contextmanager
def edge_beside(world: LocalWorld, folder: Path, **limits: float) -> Iterator[Beside]:
    """An edge `side` of the same world: near `eu`, farther from `us`."""
    with ExitStack() as stack:
        topology = world.world.topology
        ways = {
            region.name: stack.enter_context(Way(region.http).open()) for region in topology.regions
        }
        side = config.Edge(name="side", listen="127.0.0.1:0", round_trip_ms={"eu": 1, "us": 30})
        changed = replace(
            topology,
            edges=(side,),
            regions=tuple(
                replace(region, http=ways[region.name].address) for region in topology.regions
            ),
            limits=replace(topology.limits, **limits),
        )
        file = folder / "beside.toml"
        file.write_text(toml_write.dump(changed), encoding="utf-8")
        command = [sys.executable, "-m", "edge", "--topology", str(file), "--name", "side"]
        process = subprocess.Popen(
            [*command, "--state", str(world.world.state)],
            stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        log: list[str] = []
        reader = threading.Thread(target=_read, args=(process, log))
        reader.start()
        try:
            yield Beside(f"http://{_address(process, log)}", ways, process)
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            reader.join(10)
            if process.stderr is not None:
                process.stderr.close()


def _read(process: subprocess.Popen[str], log: list[str]) -> None:
    if process.stderr is not None:
        for line in process.stderr:
            log.append(line)  # noqa: PERF402 - seen by another thread as they come


def _address(process: subprocess.Popen[str], log: list[str]) -> str:
    def ready() -> bool:
        assert process.poll() is None, "the edge has ended:\n" + "".join(log[-8:])
        found = _READY.search("".join(log))
        if found is None:
            return False
        address.append(found[1])
        url = f"http://{found[1]}/readyz"
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200

    address: list[str] = []
    assert until(ready), "the edge did not come up:\n" + "".join(log[-8:])
    return address[-1]
