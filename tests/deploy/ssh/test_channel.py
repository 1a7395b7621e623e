"""The connection with a host, against a real sshd; what goes wrong names the host and the fix."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.config import Ssh
from deploy.ssh.channel import Host, HostFailed, complaint
from tests.deploy.ssh.machines import Machine, machines
from tests.servers import needed

SSH = Ssh(folder="skerry", manager="user")


@pytest.fixture(scope="module")
def alpha(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Machine]]:
    """The client's configuration, and the host."""
    with machines(tmp_path_factory.mktemp("channel"), ["alpha"]) as (config, hosts):
        yield config, hosts["alpha"]


@pytest.fixture
def host(alpha: tuple[Path, Machine]) -> Iterator[Host]:
    opened = Host("alpha", SSH, alpha[0], [])
    yield opened
    opened.close()


def changed(alpha: tuple[Path, Machine], folder: Path, old: str, new: str) -> Path:
    """The client's configuration, changed."""
    text = alpha[0].read_text(encoding="ascii")
    assert old in text
    path = folder / "config"
    path.write_text(text.replace(old, new), encoding="ascii")
    return path


def test_facts_files_and_programs(host: Host, alpha: tuple[Path, Machine]) -> None:
    home = alpha[1].home
    assert host.facts.folder == f"{home}/skerry"
    assert host.facts.units == f"{home}/.config/systemd/user"
    assert host.facts.systemd.startswith("252")
    path = f"{home}/some/where"
    assert host.read(path) is None
    host.write(path, "ä\n".encode(), 0o600)
    assert host.read(path) == "ä\n"
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert host.kinds([path, f"{home}/some", f"{home}/none"]) == ["file", "folder", ""]
    assert host.digest(path) == hashlib.sha256("ä\n".encode()).hexdigest()
    done = host.run("sh", "-c", "echo out; echo err >&2; exit 3")
    assert (done.code, done.out, done.err) == (3, "out\n", "err\n")
    with pytest.raises(HostFailed, match="alpha: counting failed: no good"):
        host.must("counting", "sh", "-c", "echo no good; exit 1")
    assert host.run("no-such-program").code == 127
    host.remove(path)
    assert host.names(f"{home}/some") == []


def test_what_does_not_arrive_as_it_was_sent_is_not_put_in_place(
    host: Host, alpha: tuple[Path, Machine], tmp_path: Path
) -> None:
    large = tmp_path / "large"
    large.write_bytes(os.urandom(700_000))
    path = f"{alpha[1].home}/large"
    sent: list[int] = []
    host.write(path, large, sent=sent.append)
    assert sum(sent) == 700_000
    assert host.digest(path) == hashlib.sha256(large.read_bytes()).hexdigest()
    with pytest.raises(HostFailed, match=r"alpha: .* did not arrive as it was sent"):
        host.write(path, b"other", sha256="0" * 64)
    assert host.digest(path) == hashlib.sha256(large.read_bytes()).hexdigest()
    with pytest.raises(HostFailed, match=r"alpha: write: .*Not a directory"):
        host.write(f"{path}/below", b"x")
    assert host.names(str(alpha[1].home / "none")) == []  # the connection goes on


def test_a_lock_is_held_by_the_connection(host: Host, alpha: tuple[Path, Machine]) -> None:
    path = f"{host.facts.folder}/lock"
    assert host.lock(path, "first") is None
    other = Host("alpha", SSH, alpha[0], [])
    try:
        assert other.lock(path, "second") == "first"
        host.close()
        assert other.lock(path, "second") is None
    finally:
        other.close()


def test_an_unknown_host_key(alpha: tuple[Path, Machine], tmp_path: Path) -> None:
    config = changed(alpha, tmp_path, "known_hosts", "nobody_known")
    with pytest.raises(HostFailed, match="alpha: its host key is not known here: `ssh alpha`"):
        Host("alpha", SSH, config, [])


def test_another_host_key(alpha: tuple[Path, Machine], tmp_path: Path) -> None:
    known, key = tmp_path / "known", tmp_path / "key"
    subprocess.run(
        [needed("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True
    )
    public = (tmp_path / "key.pub").read_text(encoding="ascii")
    known.write_text(f"[127.0.0.1]:{alpha[1].port} {public}", encoding="ascii")
    old = str(alpha[0].with_name("known_hosts"))
    with pytest.raises(HostFailed, match="alpha: its host key is another one than the known"):
        Host("alpha", SSH, changed(alpha, tmp_path, old, str(known)), [])


def test_permission_denied(alpha: tuple[Path, Machine], tmp_path: Path) -> None:
    config = changed(alpha, tmp_path, f"IdentityFile {alpha[0].with_name('client')}", "")
    config.write_text(config.read_text("ascii") + "  IdentityFile none\n", encoding="ascii")
    with pytest.raises(HostFailed, match=r"alpha: permission denied: .*`ssh-copy-id alpha`"):
        Host("alpha", SSH, config, [])


def test_nobody_listens(alpha: tuple[Path, Machine], tmp_path: Path, free_port: int) -> None:
    config = changed(alpha, tmp_path, f"Port {alpha[1].port}", f"Port {free_port}")
    with pytest.raises(HostFailed, match=r"alpha: not reached: .*refused"):
        Host("alpha", SSH, config, [])


def test_no_python(alpha: tuple[Path, Machine]) -> None:
    ssh = Ssh(folder="skerry", manager="user", python="python3.99")
    with pytest.raises(HostFailed, match=r"alpha: python3\.99 is not there: install Python 3\.11"):
        Host("alpha", ssh, alpha[0], [])


def test_an_old_python(alpha: tuple[Path, Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.ssh.channel.LEAST", (4, 0))
    with pytest.raises(HostFailed, match=r"alpha: python3 there is Python 3\.\d+; Skerry needs"):
        Host("alpha", SSH, alpha[0], [])


def test_what_ssh_says_otherwise_is_passed_on() -> None:
    said = "ssh: Could not resolve hostname far: Name or service not known\n"
    assert complaint("far", 255, said, "python3").startswith("far: no such host (ssh: Could")
    assert complaint("far", 255, "", "") == "far: the connection ended (exit code 255)"
