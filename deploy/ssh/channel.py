"""A host, spoken with over one ssh connection: its agent (`deploy.ssh.agent`) and its ports.

ssh is the operator's own program, so that keys, agents, jump hosts and known hosts are as usual.
It asks nothing: what it would have to ask for is an error that names the host and the fix.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from core.config import Ssh
from core.errors import ConfigError
from deploy.ssh import agent

CONNECT_S = 15
CHUNK = 256 * 1024
LEAST = (3, 11)
_READY = b"skerry\n"
_OLD = b"python\n"
_BOOT = (
    "import sys;v=sys.version_info;o=getattr(sys.stdout,'buffer',sys.stdout);"
    "ok=v[:2]>={least!r};"
    "o.write({ready!r} if ok else {old!r}+('%d.%d'%v[:2]).encode()+b'\\n');o.flush();"
    "ok and exec(compile(sys.stdin.buffer.read({size}),'agent','exec'),{{'__name__':'__main__'}})"
)
_T = TypeVar("_T")


class HostFailed(ConfigError):
    """Something did not work on a host; the message begins with its name."""


class Facts(msgspec.Struct, frozen=True):
    """What a host is like, see `agent.facts`."""

    python: str
    implementation: str
    system: str
    machine: str
    libc: tuple[str, str]
    folder: str
    writable: bool
    free_bytes: int
    user: str
    manager: str
    units: str
    systemd: str
    linger: bool
    packages: tuple[str, ...]
    pip: bool
    venv: bool


class Done(msgspec.Struct, frozen=True):
    """How a program ended there."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line that it said."""
        lines = [line for line in (self.err + self.out).splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"exit code {self.code}"


class Host:
    """An open connection. `forwards`: addresses, by what the topology calls them, that are to be
    reached through it. For one thread at a time."""

    def __init__(self, name: str, ssh: Ssh, config: Path | None, forwards: Sequence[str]) -> None:
        """Raises HostFailed."""
        self.name = name
        self.python = ssh.python
        self._ssh = ssh
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="sk-ssh-", dir="/tmp"))
        self.forwards: Mapping[str, Path] = {
            address: self._folder / str(number) for number, address in enumerate(forwards)
        }
        self._locked: tuple[str, str] | None = None
        try:
            self._connect()
            self.facts = self._decode(
                self._ask("facts", folder=ssh.folder, manager=ssh.manager), Facts
            )
        except BaseException:
            self.close()
            raise

    @property
    def lives(self) -> bool:
        """Whether the connection stands, as far as this side knows."""
        return self._process.poll() is None

    def revive(self) -> None:
        """Connect anew. Raises HostFailed."""
        self._disconnect()
        self._connect()
        if self._locked is not None and (holder := self.lock(*self._locked)) is not None:
            raise HostFailed(f"{self.name}: {holder} deploys there meanwhile")

    def close(self) -> None:
        """What the agent holds is free again. Idempotent."""
        self._disconnect()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _connect(self) -> None:
        self._said = bytearray()
        self._process = self._open(self._ssh, self._config)
        self._errors = threading.Thread(target=self._listen, name=f"ssh-{self.name}", daemon=True)
        self._errors.start()
        self._greet(self.python)

    def _disconnect(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # it has gone first
                    continue
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.join()
        if self._process.stderr is not None:
            self._process.stderr.close()

    # ------------------------------------------------------------------ words

    def lock(self, path: str, who: str) -> str | None:
        """None when it is ours until the end of the connection, else who has it."""
        said = self._ask("lock", path=path, who=who)
        if not said["held"]:
            return str(said["holder"])
        self._locked = (path, who)
        return None

    def read(self, path: str) -> str | None:
        text = self._ask("read", path=path)["text"]
        return None if text is None else str(text)

    def write(
        self,
        path: str,
        data: bytes | Path,
        mode: int = 0o644,
        *,
        sha256: str | None = None,
        sent: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Whole or not at all. `sent` is told how many bytes have gone. Raises HostFailed, also
        where what arrived is not what `sha256` says."""
        if isinstance(data, bytes):
            size, digest = len(data), sha256 or hashlib.sha256(data).hexdigest()
        else:
            size, digest = data.stat().st_size, sha256 or sha256_of(data)
        self._send("write", path=path, mode=mode, size=size, sha256=digest)
        if isinstance(data, bytes):
            self._put(data)
            sent(size)
        else:
            with data.open("rb") as file:
                while piece := file.read(CHUNK):
                    self._put(piece)
                    sent(len(piece))
        if self._answer("write")["damaged"]:
            raise HostFailed(
                f"{self.name}: {path} did not arrive as it was sent (its SHA-256 differs from "
                f"{digest[:16]}…); nothing was put in its place"
            )

    def kinds(self, paths: Sequence[str]) -> list[str]:
        """Of each: "file", "folder" or "" where nothing is."""
        return self._decode(self._ask("look", paths=list(paths))["kinds"], list[str])

    def names(self, folder: str) -> list[str]:
        return self._decode(self._ask("names", path=folder)["names"], list[str])

    def digest(self, path: str) -> str:
        return str(self._ask("digest", path=path)["sha256"])

    def remove(self, *paths: str) -> None:
        self._ask("remove", paths=list(paths))

    def move(self, source: str, target: str) -> None:
        self._ask("move", source=source, target=target)

    def run(self, *command: str, timeout_s: int = 600) -> Done:
        return self._decode(self._ask("run", command=list(command), timeout_s=timeout_s), Done)

    def must(self, what: str, *command: str, timeout_s: int = 600) -> Done:
        """Raises HostFailed, with `what` and the last line that it said, when it fails."""
        done = self.run(*command, timeout_s=timeout_s)
        if done.code:
            raise HostFailed(f"{self.name}: {what} failed: {done.last}")
        return done

    # ------------------------------------------------------------------ connection

    def _open(self, ssh: Ssh, config: Path | None) -> subprocess.Popen[bytes]:
        program = shutil.which("ssh")
        if program is None:
            raise ConfigError("ssh is not installed here (Debian: apt-get install openssh-client)")
        source = _source()
        boot = _BOOT.format(least=LEAST, ready=_READY, old=_OLD, size=len(source))
        words = [program, "-T", "-x", *(("-F", str(config)) if config else ())]
        for option in (
            "BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ServerAliveInterval=10",
            "ServerAliveCountMax=3", "StreamLocalBindUnlink=yes", "StreamLocalBindMask=0177",
            "ControlPath=none",
        ):  # fmt: skip
            words += ["-o", option]
        for address, path in self.forwards.items():
            words += ["-L", f"{path}:{dialled(address)}"]
        words += ["--", self.name, f"exec {shlex.quote(ssh.python)} -c {shlex.quote(boot)}"]
        # A session of its own: Ctrl-C is for us to answer, and we need the host to go back.
        return subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def _greet(self, python: str) -> None:
        line = _stream(self._process.stdout).readline()
        if line == _OLD:
            version = _stream(self._process.stdout).readline().decode().strip()
            raise HostFailed(
                f"{self.name}: {python} there is Python {version}; Skerry needs 3.11 or newer: "
                'install it, and name it in the topology as [ssh] python = "python3.11"'
            )
        if line != _READY:
            self._lost(python)
        self._put(_source())

    def _listen(self) -> None:
        stream = _stream(self._process.stderr)
        while line := stream.readline():
            self._said += line
            del self._said[:-4000]

    def _ask(self, word: str, **more: object) -> Mapping[str, object]:
        self._send(word, **more)
        return self._answer(word)

    def _send(self, word: str, **more: object) -> None:
        body = json.dumps({"word": word, **more}).encode()
        self._put(struct.pack("!I", len(body)) + body)

    def _put(self, data: bytes) -> None:
        try:
            stream = _stream(self._process.stdin)
            stream.write(data)
            stream.flush()
        except (OSError, ValueError):
            self._lost("")

    def _answer(self, word: str) -> Mapping[str, object]:
        stream = _stream(self._process.stdout)
        try:
            head = stream.read(4)
            body = stream.read(struct.unpack("!I", head)[0]) if len(head) == 4 else b""
        except (OSError, ValueError):
            body = b""
        if not body:
            self._lost("")
        answer = self._decode(json.loads(body), dict[str, object])
        if "error" in answer:
            raise HostFailed(f"{self.name}: {word}: {answer['error']}")
        return answer

    def _lost(self, python: str) -> None:
        """Always raises HostFailed."""
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._errors.join(2)
        raise HostFailed(complaint(self.name, code, self._said.decode(errors="replace"), python))

    def _decode(self, value: object, kind: type[_T]) -> _T:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise HostFailed(f"{self.name}: its agent's answer does not fit: {error}") from error


def complaint(host: str, code: int, said: str, python: str) -> str:
    """What to say of a connection that ended, by what ssh and the host's shell said. `python` is
    what was to be started there, "" once it ran. Pure."""
    low = said.lower()
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    if "remote host identification has changed" in low:
        return (
            f"{host}: its host key is another one than the known one. If it was set up anew, "
            f"`ssh-keygen -R {_bare(host)}`, then `ssh {host}` once; else do not go on"
        )
    if "host key verification failed" in low:
        return (
            f"{host}: its host key is not known here: `ssh {host}` once and compare what it shows, "
            "or add it to known_hosts"
        )
    if "permission denied" in low:
        return (
            f"{host}: permission denied: its user's authorized_keys needs your public key "
            f"(`ssh-copy-id {host}`), or your key needs to be in ssh-agent"
        )
    if "could not resolve" in low:
        return f"{host}: no such host ({last}); a name of your own goes into the SSH configuration"
    if any(word in low for word in ("connection refused", "timed out", "no route", "unreachable")):
        return f"{host}: not reached: {last}"
    if python and code in (126, 127):
        return (
            f"{host}: {python} is not there: install Python 3.11 or newer, or say where it is: "
            '[ssh] python = "/path/to/python3"'
        )
    return f"{host}: the connection ended ({last or f'exit code {code}'})"


def dialled(address: str) -> str:
    """Where a listening address is reached on its own machine."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]") else address


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _source() -> bytes:
    return Path(agent.__file__).read_bytes()


def _stream(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "opened with pipes"
    return pipe


def _bare(host: str) -> str:
    return host.rpartition("@")[2]
