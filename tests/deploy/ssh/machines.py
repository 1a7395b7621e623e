"""Hosts for tests: a real sshd on loopback for each, with a home folder, a host key, and a
stand-in for systemd of its own. The client's configuration names them."""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.ssh import systemd_standin
from tests.servers import needed

START_S = 30.0


@dataclass
class Machine:
    """One host. `home` is what its user sees as home."""

    name: str
    home: Path
    port: int
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def units(self) -> Path:
        return self.home / ".config" / "systemd" / "user"

    @property
    def calls(self) -> list[str]:
        """What systemctl was called with, but for questions."""
        path = self.home / ".standin" / "calls"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [line for line in lines if not line.startswith("show ")]

    def main_pid(self, service: str) -> int:
        return int(self._state(service)["MainPID"])

    def active(self, service: str) -> bool:
        return self._state(service)["ActiveState"] == "active"

    def _state(self, service: str) -> dict[str, str]:
        import json

        path = self.home / ".standin" / f"{service}.json"
        found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def end(self) -> None:
        """Nothing that was started on it is left."""
        run = self.home / ".standin"
        for pid_file in run.glob("*.pid") if run.exists() else ():
            keeper = int(pid_file.read_text(encoding="ascii"))
            main = self.main_pid(pid_file.name.removesuffix(".pid"))
            for pid in (keeper, main):
                if pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


@contextmanager
def machines(folder: Path, names: Sequence[str]) -> Iterator[tuple[Path, dict[str, Machine]]]:
    """The client's configuration, and the hosts by name."""
    sshd, keygen = needed("sshd"), needed("ssh-keygen")
    _key(keygen, folder / "client")
    with ExitStack() as stack:
        made: dict[str, Machine] = {}
        for name in names:
            made[name] = _machine(sshd, keygen, folder, name)
            stack.callback(made[name].end)
        config = folder / "ssh_config"
        known = folder / "known_hosts"
        known.write_text(
            "".join(
                f"[127.0.0.1]:{one.port} {(folder / f'{name}.key.pub').read_text(encoding='ascii')}"
                for name, one in made.items()
            ),
            encoding="ascii",
        )
        config.write_text(
            "".join(
                f"Host {name}\n  HostName 127.0.0.1\n  Port {one.port}\n"
                for name, one in made.items()
            )
            + f"Host *\n  User {getpass.getuser()}\n  IdentityFile {folder / 'client'}\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {known}\n  LogLevel ERROR\n",
            encoding="ascii",
        )
        yield config, made


def _machine(sshd: str, keygen: str, folder: Path, name: str) -> Machine:
    home, tools = folder / name, folder / f"{name}.bin"
    home.mkdir()
    tools.mkdir()
    for called in ("systemctl", "journalctl"):
        put_program(tools / called, Path(systemd_standin.__file__))
    _key(keygen, folder / f"{name}.key")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    config = folder / f"{name}.sshd"
    settings = {
        "ListenAddress": f"127.0.0.1:{port}",
        "HostKey": folder / f"{name}.key",
        "PidFile": "none",
        "AuthorizedKeysFile": folder / "client.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        # pip is not to compile what no test imports.
        "SetEnv": f"HOME={home} PATH={tools}:/usr/bin:/bin XDG_CONFIG_HOME={home}/.config "
        "PIP_NO_COMPILE=1",
    }
    config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()), "ascii")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # as Debian's unit does
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sshd, "-D", "-e", "-f", str(config)], stdout=log, stderr=log)
    end = time.monotonic() + START_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return Machine(name, home, port, process)
        assert process.poll() is None, (folder / f"{name}.log").read_text(encoding="utf-8")
        assert time.monotonic() < end, "sshd does not listen"
        time.sleep(0.02)


def put_program(path: Path, source: Path) -> None:
    """A program that is this Python file, started quickly, and told what it is called."""
    words = shlex.join([sys.executable, "-SE", str(source), path.name])
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _key(keygen: str, path: Path) -> None:
    subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
