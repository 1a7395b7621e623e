"""What `skerry deploy --target ssh` runs on each host while it works there.

Its text is sent over ssh and run by the host's Python; nothing of it stays. Standard library only,
and one file. It reads frames from standard input and answers each on standard output: four bytes
of length, JSON, and for `write` the file itself after it. It ends with its connection, and what it
holds (the lock) ends with it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import IO, TypeVar

Json = dict[str, object]
_T = TypeVar("_T")
CHUNK = 1 << 20
RUN_S = 900.0
_held: list[IO[str]] = []
"""Locks, until the end of the process."""


def facts(ask: Json) -> Json:
    """`folder`: where things are to lie; `manager`: auto, system or user."""
    home = os.path.expanduser("~")
    folder = os.path.join(home, _text(ask, "folder"))
    there = folder
    while not os.path.exists(there):
        there = os.path.dirname(there)
    manager = _text(ask, "manager")
    if manager == "auto":
        manager = "system" if os.getuid() == 0 else "user"
    usage = shutil.disk_usage(there)
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "implementation": platform.python_implementation(),
        "system": platform.system(),
        "machine": platform.machine(),
        "libc": list(platform.libc_ver()),
        "folder": folder,
        "writable": os.access(there, os.W_OK | os.X_OK),
        "free_bytes": usage.free,
        "user": _user(),
        "manager": manager,
        "units": _units_folder(manager, home),
        "systemd": _systemd(manager),
        "linger": manager == "system" or os.path.exists(f"/var/lib/systemd/linger/{_user()}"),
        "packages": [path for path in sys.path if path.endswith(("-packages",))],
        "pip": _has("pip"),
        "venv": _has("venv") and _has("ensurepip"),
    }


def lock(ask: Json) -> Json:
    """One deploy at a time below a folder. `who` is told to the one who comes second."""
    path = _text(ask, "path")
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  kept open: it is the lock
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        return {"held": False, "holder": holder}
    file.seek(0)
    file.truncate()
    file.write(_text(ask, "who"))
    file.flush()
    _held.append(file)
    return {"held": True}


def read(ask: Json) -> Json:
    """Text of a file; None where there is none."""
    try:
        with open(_text(ask, "path"), encoding="utf-8", errors="replace") as file:
            return {"text": file.read()}
    except FileNotFoundError:
        return {"text": None}


def write(ask: Json) -> Json:
    """`size` bytes follow the frame. Whole and with the digest `sha256`, or not at all."""
    path, mode, left = _text(ask, "path"), _number(ask, "mode"), _number(ask, "size")
    fresh = f"{path}.{os.getpid()}"
    digest = hashlib.sha256()
    failure: OSError | None = None
    file = None
    try:
        folder_mode = 0o700 if mode == 0o600 else 0o755
        os.makedirs(os.path.dirname(path), mode=folder_mode, exist_ok=True)
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        os.fchmod(file, mode)
    except OSError as error:
        failure = error
    while left:
        piece = sys.stdin.buffer.read(min(left, CHUNK))
        if not piece:
            raise EOFError
        left -= len(piece)
        digest.update(piece)
        if file is None or failure is not None:
            continue  # what follows the frame has to be read all the same
        try:
            view = memoryview(piece)
            while view:
                view = view[os.write(file, view) :]
        except OSError as error:
            failure = error
    if file is not None:
        os.close(file)
    if failure is not None:
        _unlink(fresh)
        raise failure
    if digest.hexdigest() != ask["sha256"]:
        _unlink(fresh)
        return {"damaged": True}
    os.replace(fresh, path)
    return {"damaged": False}


def look(ask: Json) -> Json:
    """Which of `paths` are there: "file", "folder" or ""."""
    return {
        "kinds": [
            "folder" if os.path.isdir(path) else "file" if os.path.exists(path) else ""
            for path in _texts(ask, "paths")
        ]
    }


def names(ask: Json) -> Json:
    """What lies in a folder; nothing where there is none."""
    try:
        return {"names": sorted(os.listdir(_text(ask, "path")))}
    except (FileNotFoundError, NotADirectoryError):
        return {"names": []}


def digest(ask: Json) -> Json:
    """SHA-256 of a file; "" where there is none."""
    try:
        with open(_text(ask, "path"), "rb") as file:
            found = hashlib.sha256()
            while piece := file.read(CHUNK):
                found.update(piece)
            return {"sha256": found.hexdigest()}
    except (FileNotFoundError, IsADirectoryError):
        return {"sha256": ""}


def remove(ask: Json) -> Json:
    for path in _texts(ask, "paths"):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            _unlink(path)
    return {}


def move(ask: Json) -> Json:
    os.replace(_text(ask, "source"), _text(ask, "target"))
    return {}


def run(ask: Json) -> Json:
    """A program, without a shell. The last of what it said."""
    command = _texts(ask, "command")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=float(_number(ask, "timeout_s")), env=_environment(), check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return {"code": 127, "out": "", "err": f"{command[0]}: not found"}
    except subprocess.TimeoutExpired:
        return {"code": 124, "out": "", "err": f"{command[0]} did not end in time"}
    last = 200_000
    return {
        "code": done.returncode,
        "out": done.stdout.decode(errors="replace")[-last:],
        "err": done.stderr.decode(errors="replace")[-last:],
    }


_WORDS: dict[str, Callable[[Json], Json]] = {
    one.__name__: one for one in (facts, lock, read, write, look, names, digest, remove, move, run)
}


def main() -> None:
    os.umask(0o022)
    source = sys.stdin.buffer
    while True:
        head = source.read(4)
        if len(head) < 4:
            return
        ask: Json = json.loads(source.read(struct.unpack("!I", head)[0]))
        try:
            answer = _WORDS[_text(ask, "word")](ask)
        except EOFError:
            return
        except OSError as error:
            answer = {"error": f"{error.filename or ask.get('path', '')}: {error.strerror}"}
        body = json.dumps(answer).encode()
        sys.stdout.buffer.write(struct.pack("!I", len(body)) + body)
        sys.stdout.buffer.flush()


def _environment() -> dict[str, str]:
    """Ours, in which a user's systemd is found also where no login has set that up."""
    runtime = f"/run/user/{os.getuid()}"
    unwanted = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {"XDG_RUNTIME_DIR": runtime, **kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "LC_ALL": "C"}


def _systemd(manager: str) -> str:
    """Its version where its manager answers, else ""."""
    words = ["systemctl", *(["--user"] if manager == "user" else [])]
    done = run({"command": [*words, "show", "--property=Version", "--value"], "timeout_s": 20})
    return str(done["out"]).strip() if done["code"] == 0 else ""


def _units_folder(manager: str, home: str) -> str:
    if manager == "system":
        return "/etc/systemd/system"
    return os.path.join(os.environ.get("XDG_CONFIG_HOME") or f"{home}/.config", "systemd", "user")


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _user() -> str:
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def _text(ask: Json, key: str) -> str:
    return _of(ask, key, str)


def _number(ask: Json, key: str) -> int:
    return _of(ask, key, int)


def _texts(ask: Json, key: str) -> list[str]:
    return [str(one) for one in _of(ask, key, list)]


def _of(ask: Json, key: str, kind: type[_T]) -> _T:
    value = ask[key]
    assert isinstance(value, kind), key
    return value


if __name__ == "__main__":
    main()
