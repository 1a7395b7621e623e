"""The socket of a running world: its owner's requests, and nothing else."""

from __future__ import annotations

import errno
import os
import socket
import socketserver
import stat
import threading
import time
from pathlib import Path

import pytest

from core.accepting import PAUSE_S
from core.errors import ConfigError
from deploy.rollout.control import LONGEST_PATH, Tell, ask, serving
from deploy.rollout.messages import Ask, Deploy, Said, View
from deploy.rollout.running import control_of
from deploy.state import claim


def count(what: Ask, tell: Tell) -> None:
    if isinstance(what, View):
        raise ConfigError("nobody runs")
    assert isinstance(what, Deploy)
    for number in range(3):
        tell(Said(f"{what.unit} {number}"))


def test_lines_come_one_after_the_other_and_errors_are_raised(tmp_path: Path) -> None:
    with serving(tmp_path / "control.sock", count) as where:
        assert stat.S_IMODE(where.stat().st_mode) == 0o600
        told = list(ask(where, Deploy(unit="eu")))
        assert told == [Said("eu 0"), Said("eu 1"), Said("eu 2")]
        with pytest.raises(ConfigError, match="nobody runs"):
            list(ask(where, View()))
    assert not where.exists()
    with pytest.raises(ConfigError, match="does not answer"):
        list(ask(where, View()))


@pytest.mark.parametrize("line", [b"{}\n", b"rm -rf\n", b'{"ask":"shell"}\n', b"\n"])
def test_what_is_no_request_is_refused(tmp_path: Path, line: bytes) -> None:
    with serving(tmp_path / "control.sock", count) as where, socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(where))
        raw.sendall(line)
        with raw.makefile("rb") as lines:
            assert b"does not understand" in lines.readline()


def test_a_folder_with_a_long_path_has_its_socket_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * LONGEST_PATH)
    folder.mkdir()
    with serving(folder / "control.sock", count) as where:
        assert where.parent != folder
        assert stat.S_IMODE(where.parent.stat().st_mode) == 0o700
        assert len(list(ask(where, Deploy(unit="eu")))) == 3
    assert not where.parent.exists()


def test_a_caller_who_leaves_does_not_stop_what_is_begun(tmp_path: Path) -> None:
    gone, ended = threading.Event(), threading.Event()

    def slow(what: Ask, tell: Tell) -> None:
        tell(Said("begun"))
        assert gone.wait(30)
        for _ in range(100):
            tell(Said("on"))
        ended.set()

    with serving(tmp_path / "control.sock", slow) as where:
        told = ask(where, Deploy(unit="eu"))
        assert next(told) == Said("begun")
        del told
        gone.set()
        assert ended.wait(30)


def test_without_room_for_a_caller_it_pauses_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[float] = []
    inner = socketserver.ThreadingUnixStreamServer.get_request

    def crowded(self: socketserver.ThreadingUnixStreamServer) -> object:
        tried.append(time.monotonic())
        if len(tried) <= 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return inner(self)

    monkeypatch.setattr(socketserver.ThreadingUnixStreamServer, "get_request", crowded)
    with serving(tmp_path / "control.sock", count) as where:
        assert len(list(ask(where, Deploy(unit="eu")))) == 3
    assert len(tried) == 4
    assert tried[3] - tried[0] >= 3 * PAUSE_S * 0.9, "it did not spin"
    assert len([one for one in caplog.records if "no room" in one.message]) == 1


def test_a_disk_that_is_full_is_told(tmp_path: Path) -> None:
    def full(what: Ask, tell: Tell) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "topology-2.toml")

    with (
        serving(tmp_path / "control.sock", full) as where,
        pytest.raises(ConfigError, match=r"No space left on device: 'topology-2\.toml'"),
    ):
        list(ask(where, Deploy(unit="eu")))


def test_a_world_is_found_by_its_state(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no world runs on"):
        control_of(tmp_path / "state")
    with pytest.raises(ConfigError, match="no world runs here"):
        control_of(None, root=tmp_path)
    with claim(tmp_path / "state") as folder:
        folder.record({}, {}, None, tmp_path / "c.sock")
        assert control_of(tmp_path / "state") == tmp_path / "c.sock"
        assert control_of(None, root=tmp_path) == tmp_path / "c.sock"
        folder.record({}, {})
        with pytest.raises(ConfigError, match="earlier release"):
            control_of(tmp_path / "state")
