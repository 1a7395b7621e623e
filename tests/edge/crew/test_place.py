"""What a crew reserves: its address against others, not against connections that are over."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from core.errors import ConfigError
from edge.crew.place import private_folder, reserved, sweep

KILLED = """
import os, signal, sys
from pathlib import Path
from edge.crew.place import private_folder
with private_folder(Path(sys.argv[1])) as folder:
    (folder / "1.sock").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _waiting() -> str:
    """An address with a connection in TIME_WAIT, as a common server leaves it that ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address: tuple[str, int] = server.getsockname()
        with socket.create_connection(address) as caller:
            ours, _ = server.accept()
            ours.close()  # the first to close is the one who waits
            assert caller.recv(1) == b""
    return f"{address[0]}:{address[1]}"


def test_connections_that_are_over_do_not_keep_the_port() -> None:
    listen = _waiting()
    host, port = listen.split(":")
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind((host, int(port)))  # the connection is there
    with reserved(listen) as address:
        assert address == listen


def test_workers_share_what_is_reserved() -> None:
    with reserved("127.0.0.1:0") as address:
        host, port = address.split(":")
        for _ in range(2):
            with socket.create_server((host, int(port)), reuse_port=True) as worker:
                assert worker.getsockname()[1] == int(port)


def test_a_port_that_another_crew_shares_is_refused() -> None:
    with reserved("127.0.0.1:0") as address:
        host, port = address.split(":")
        with (
            socket.create_server((host, int(port)), reuse_port=True),
            pytest.raises(ConfigError, match=f"{address} cannot be listened on: Address already"),
            reserved(address),
        ):
            pass


def test_two_crews_that_start_together_do_not_share_a_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both have found it free, and neither has bound it yet."""
    with reserved("127.0.0.1:0") as address:
        pass
    refused: list[str] = []

    class Slow(socket.socket):
        def close(self) -> None:
            super().close()
            if not refused:
                refused.append("begun")
                with pytest.raises(ConfigError, match="Address already in use"), reserved(address):
                    refused.append("shared")

    monkeypatch.setattr(socket, "socket", Slow)
    with reserved(address):
        assert refused == ["begun"]


def test_the_folder_is_gone_at_the_end(tmp_path: Path) -> None:
    with private_folder(tmp_path) as folder:
        (folder / "1.sock").touch()
        assert folder.stat().st_mode & 0o777 == 0o700
        sweep(tmp_path)
        assert folder.exists(), "swept from under a crew that lives"
    assert list(tmp_path.iterdir()) == []


def test_folders_of_a_killed_crew_are_swept(tmp_path: Path) -> None:
    strangers = [tmp_path / "skerry-else", tmp_path / "skerry-edge-new"]
    for one in strangers:
        one.mkdir()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -9
    assert len(os.listdir(tmp_path)) == 3
    with private_folder(tmp_path) as folder:
        assert sorted(tmp_path.iterdir()) == sorted([*strangers, folder])
