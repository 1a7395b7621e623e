"""The holder of an edge's socket: one process beside the other on it, and none when none is to be.
The edge is a small program here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from core.pauses import Pauses
from deploy.ssh.holder import CONFIG_EXIT, Holder

EDGE = """
    import os, select, signal, socket, sys
    name = sys.argv[1]
    numbers = [int(word) for word in sys.argv[2:] if word.isdigit()]
    listeners = [socket.socket(fileno=number) for number in numbers]
    def leave(*_):
        raise SystemExit(0)
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGUSR1, leave)
    if name == "refuses":
        raise SystemExit(2)
    while True:
        for ready in select.select(listeners, [], [])[0]:
            connection, _ = ready.accept()
            asked = connection.recv(9)
            connection.sendall(f"{name} {os.getpid()}".encode())
            connection.close()
            if asked == b"die":
                os._exit(1)
"""


class Held:
    def __init__(self, task: asyncio.Task[int], port: int, program: Path) -> None:
        self.task = task
        self._port = port
        self._program = program

    def command(self, name: str) -> list[str]:
        return [sys.executable, "-SE", str(self._program), name]

    async def ask(self, what: bytes = b"who", port: int | None = None) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self._port)
        writer.write(what)
        answer = await reader.read()
        writer.close()
        return answer.decode().partition(" ")[0]


@asynccontextmanager
async def held(folder: Path, name: str = "first") -> AsyncIterator[Held]:
    program = folder / "edge.py"
    program.write_text(textwrap.dedent(EDGE), encoding="utf-8")
    before = os.getcwd()
    os.chdir(folder)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            holder = Holder(listener, Pauses(0.05, 0.1, 5.0))
            port = listener.getsockname()[1]
            command = [sys.executable, "-SE", str(program), name]
            task = asyncio.ensure_future(holder.run(command, "nyc.holder"))
            edge = Held(task, port, program)
            if name != "refuses":
                assert await edge.ask() == name
            yield edge
            if not task.done():
                os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(30):
                await task
    finally:
        os.chdir(before)


Said = dict[str, object]


class Line:
    """A connection with the holder."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls) -> Line:
        return cls(*await asyncio.open_unix_connection("nyc.holder"))

    async def ask(self, **what: object) -> Said:
        self._writer.write(json.dumps(what).encode() + b"\n")
        return await self.read()

    async def read(self) -> Said:
        async with asyncio.timeout(30):
            said: Said = json.loads(await self._reader.readline())
        return said

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):  # the holder has closed it first
            await self._writer.wait_closed()


def test_another_process_takes_the_place_on_the_same_socket(tmp_path: Path) -> None:
    async def scene() -> None:
        async with held(tmp_path) as edge:
            assert await edge.ask() == "first"
            line = await Line.open()
            said = await line.ask(command=edge.command("second"))
            host, _, port = str(said["at"]).rpartition(":")
            assert await edge.ask(port=int(port)) == "second"
            assert await line.ask(keep=True) == {"kept": True}
            await line.close()
            # Whoever still reaches the first one is answered; then it is gone.
            while await edge.ask() != "second":
                await asyncio.sleep(0.01)
            assert {await edge.ask() for _ in range(5)} == {"second"}
        assert edge.task.result() == 0
        assert host == "127.0.0.1"
        assert not (tmp_path / "nyc.holder").exists()

    asyncio.run(scene())


def test_one_that_nobody_keeps_ends_and_the_first_goes_on(tmp_path: Path) -> None:
    async def scene() -> None:
        async with held(tmp_path) as edge:
            line = await Line.open()
            said = await line.ask(command=edge.command("second"))
            await line.close()
            pid = int(str(said["pid"]))
            async with asyncio.timeout(30):
                while Path(f"/proc/{pid}").exists():
                    await asyncio.sleep(0.01)
            assert {await edge.ask() for _ in range(5)} == {"first"}

    asyncio.run(scene())


def test_one_that_ends_while_starting_is_said(tmp_path: Path) -> None:
    async def scene() -> None:
        async with held(tmp_path) as edge:
            line = await Line.open()
            await line.ask(command=edge.command("refuses"))
            assert await line.read() == {"ended": 2}
            await line.close()
            line = await Line.open()
            assert "No such file" in str((await line.ask(command=["/no/such/python"]))["error"])
            await line.close()
            assert await edge.ask() == "first"

    asyncio.run(scene())


def test_one_at_a_time_takes_the_place(tmp_path: Path) -> None:
    async def scene() -> None:
        async with held(tmp_path) as edge:
            first, second = await Line.open(), await Line.open()
            await first.ask(command=edge.command("second"))
            said = await second.ask(command=edge.command("third"))
            assert said == {"error": "another process is taking its place already"}
            await first.close()
            await second.close()

    asyncio.run(scene())


def test_an_edge_that_dies_comes_back_to_those_who_wait_in_the_socket(tmp_path: Path) -> None:
    async def scene() -> None:
        async with held(tmp_path) as edge:
            assert await edge.ask(b"die") == "first"
            assert await edge.ask() == "first"

    asyncio.run(scene())


def test_an_edge_that_refuses_its_configuration_is_not_started_again(tmp_path: Path) -> None:
    async def scene() -> None:
        async with held(tmp_path, "refuses") as edge:
            async with asyncio.timeout(30):
                assert await edge.task == CONFIG_EXIT

    asyncio.run(scene())


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b"[]\n", b'{"command": 3}\n'])
def test_what_is_no_request_changes_nothing(tmp_path: Path, line: bytes) -> None:
    async def scene() -> None:
        async with held(tmp_path) as edge:
            reader, writer = await asyncio.open_unix_connection("nyc.holder")
            writer.write(line)
            assert await reader.read() == b""
            writer.close()
            assert await edge.ask() == "first"

    asyncio.run(scene())
