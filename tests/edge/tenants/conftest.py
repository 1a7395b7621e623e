"""A real Redis for the tests that need one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import needed


class RedisServer:
    """A `redis-server` on a socket of its own, in memory alone."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._socket = folder / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [
            self._program, "--port", "0", "--unixsocket", str(self._socket),
            "--save", "", "--appendonly", "no", "--dir", str(self._socket.parent),
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "accept connections" in line:
                return
        raise AssertionError(f"redis-server ended with {self._process.wait()}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
            self._socket.unlink(missing_ok=True)


@pytest.fixture
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Started and empty."""
    server = RedisServer(needed("redis-server"), tmp_path_factory.mktemp("redis"))
    server.start()
    try:
        yield server
    finally:
        server.kill()
