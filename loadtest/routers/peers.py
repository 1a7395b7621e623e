"""Routers of other projects: where they are, and how each is started in front of backends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loadtest.bench.peers import find, folder
from loadtest.routers.text import SHRUNK

START_S = 60.0
STOP_S = 10.0


class RouterFailed(Exception):
    """It did not come up, or died; the message says which."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A router as its project ships it, with its cache-aware policy and default thresholds. What
    is measured in characters is divided by `SHRUNK`, what in seconds by the speed of time."""

    package: str
    program: str
    arguments: tuple[str, ...]
    tree_chars: int
    evict_s: float

    def command(
        self, root: Path, port: int, metrics: int, urls: Sequence[str], speed: float
    ) -> list[str]:
        return [
            str(root / "bin" / self.program), *self.arguments,
            "--host", "127.0.0.1", "--port", str(port),
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics),
            "--policy", "cache_aware",
            "--max-tree-size", str(self.tree_chars // SHRUNK),
            "--eviction-interval-secs", str(max(1, round(self.evict_s / speed))),
            "--worker-startup-check-interval", "1",
            "--log-level", "warn" if self.program == "sglang-router" else "warning",
            "--worker-urls", *urls,
        ]  # fmt: skip


KINDS = {
    "vllm-router, cache_aware": Kind("vllm-router", "vllm-router", (), 33_554_432, 120.0),
    "sglang-router, cache_aware": Kind(
        "sglang-router", "sglang-router", ("launch",), 67_108_864, 60.0
    ),
}


@dataclass(frozen=True, slots=True)
class Routers:
    """`there`: name → version of what is installed."""

    root: Path
    there: Mapping[str, str]

    def missing(self) -> list[str]:
        return [name for name in KINDS if name not in self.there]


def installed(project: Path) -> Routers:
    root = folder(project, os.environ)
    versions = find(root).versions
    return Routers(
        root,
        {name: versions[kind.package] for name, kind in KINDS.items() if kind.package in versions},
    )


@asynccontextmanager
async def running(
    name: str, root: Path, urls: Sequence[str], speed: float, log: Path
) -> AsyncIterator[str]:
    """The router's address, while it runs. Its output goes to `log`. Raises RouterFailed."""
    port, metrics = _free_port(), _free_port()
    command = KINDS[name].command(root, port, metrics, urls, speed)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=out, stderr=out, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        await _until_ready(name, url, process, len(urls))
        yield url
    finally:
        await _stop(process)


async def _until_ready(
    name: str, url: str, process: asyncio.subprocess.Process, backends: int
) -> None:
    """Every backend has to be known: it answers for them one by one."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + START_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
        while loop.time() < ends:
            if process.returncode is not None:
                raise RouterFailed(f"{name} ended with status {process.returncode}")
            try:
                async with session.get(f"{url}/readiness") as answer:
                    if answer.status == 200 and await _knows(session, url) >= backends:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass  # not up yet
            await asyncio.sleep(0.2)
    raise RouterFailed(f"{name} was not ready after {START_S:.0f} s")


async def _knows(session: aiohttp.ClientSession, url: str) -> int:
    """How many backends it takes for healthy."""
    async with session.get(f"{url}/workers") as answer:
        told = await answer.json()
    return sum(bool(one.get("is_healthy")) for one in told["workers"])


async def _stop(process: asyncio.subprocess.Process) -> None:
    """With everything that it started."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
