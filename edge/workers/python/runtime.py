"""A Python Worker as a process: in a sandbox of bubblewrap, without a network, with its own files.

Its interpreter is ours without our packages: the standard library, h11, and `inside/`.
"""

from __future__ import annotations

import compileall
import os
import platform
import shutil
import socket
import sys
from pathlib import Path
from typing import Final

import h11
import msgspec

from core.errors import ConfigError
from edge.workers.bundle import Bundle, Language
from edge.workers.python import seccomp
from edge.workers.python.egress import Egress
from edge.workers.runtime import Launch, Seat

INSIDE = Path(__file__).parent / "inside"
H11 = Path(h11.__file__).parent
MAIN = "edge.workers.python.inside.main"
FLAGS = ("-s", "-S", "-P", "-B")
"""No packages but ours, nothing of the current folder, nothing written."""
TMP_BYTES = 16 << 20
BACKLOG = 16
"""Of questions to a process."""
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin")


class PythonRuntime:
    """`trusted`: without a sandbox, where the topology says that Workers may be trusted."""

    language: Final[Language] = "python"

    def __init__(self, egress: Egress, *, trusted: bool) -> None:
        self._egress = egress
        self._trusted = trusted
        self._controls: dict[Path, socket.socket] = {}
        """Ours, since a process in its sandbox writes no file of the machine's."""
        self._filters: dict[Path, int] = {}
        for folder in (INSIDE, H11):  # a process cannot keep what it compiles
            compileall.compile_dir(str(folder), quiet=2)

    async def prepare(self, seat: Seat, bundle: Bundle) -> Launch:
        """See `Runtime`."""
        code, run = seat.folder / "code", seat.folder / "run"
        for module in bundle.modules:
            path = code / module.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(module.body)
        run.mkdir(mode=0o700)
        control = self._listen(seat.control)
        await self._egress.open(run / "out", seat)
        if self._trusted:
            return self._open(seat, bundle, code, run, control)
        return self._boxed(seat, bundle, code, run, control)

    async def release(self, seat: Seat) -> None:
        """See `Runtime`."""
        await self._egress.close(seat.folder / "run" / "out")
        self._close(seat.control)
        self._drop_filter(seat.control)

    def _listen(self, path: Path) -> int:
        """The descriptor of the socket on which the next process at `path` is asked."""
        self._close(path)
        listener = self._controls[path] = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(BACKLOG)
        return listener.fileno()

    def _close(self, path: Path) -> None:
        listener = self._controls.pop(path, None)
        if listener is not None:
            listener.close()
        path.unlink(missing_ok=True)

    def _filter(self, seat: Seat) -> tuple[int, ...]:
        """The descriptor from which bubblewrap reads what the kernel refuses; none where we have no
        filter for this machine."""
        self._drop_filter(seat.control)
        program = seccomp.program(platform.machine())
        if program is None:
            return ()
        path = seat.folder / "filter"
        path.write_bytes(program)
        number = self._filters[seat.control] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return (number,)

    def _drop_filter(self, control: Path) -> None:
        number = self._filters.pop(control, None)
        if number is not None:
            os.close(number)

    def _boxed(self, seat: Seat, bundle: Bundle, code: Path, run: Path, control: int) -> Launch:
        program = sandbox()
        if program is None:
            raise ConfigError(
                "Python Workers run in a sandbox of bubblewrap, which is not installed (Debian:"
                " apt-get install bubblewrap); workers.trusted = true does without one"
            )
        _write(run / "settings", seat, bundle, control, "/worker", "/run/skerry")
        base, filters = Path(sys.base_prefix), self._filter(seat)
        argv = [
            program,
            *(
                "--unshare-all",
                "--unshare-user",
                "--disable-userns",
                "--die-with-parent",
                "--new-session",
            ),
            *(part for number in filters for part in ("--seccomp", str(number))),
            *("--cap-drop", "ALL", "--uid", "1000", "--gid", "1000", "--hostname", "worker"),
            *(part for path in _SYSTEM for part in _shown(Path(path))),
            *(() if base.is_relative_to("/usr") else ("--ro-bind", str(base), str(base))),
            *("--ro-bind", str(INSIDE), "/skerry/edge/workers/python/inside"),
            *("--ro-bind", str(H11), "/skerry/h11"),
            *("--ro-bind", str(code), "/worker", "--ro-bind", str(run), "/run/skerry"),
            *("--proc", "/proc", "--dev", "/dev", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"),
            *("--remount-ro", "/dev"),  # /dev/shm would be memory that no limit counts
            *("--chdir", "/worker", "--remount-ro", "/", "--"),
            *_python("/run/skerry/settings"),
        ]
        environment = {"PYTHONPATH": "/skerry", "HOME": "/tmp"}
        return Launch(tuple(argv), environment, wrapped=True, descriptors=(control, *filters))

    def _open(self, seat: Seat, bundle: Bundle, code: Path, run: Path, control: int) -> Launch:
        _write(run / "settings", seat, bundle, control, str(code), str(run))
        packages = seat.folder / "packages"
        ours = packages / "edge" / "workers" / "python"
        ours.mkdir(parents=True)
        (ours / "inside").symlink_to(INSIDE)
        (packages / "h11").symlink_to(H11)
        return Launch(
            _python(str(run / "settings")),
            {"PYTHONPATH": str(packages), "HOME": str(code)},
            descriptors=(control,),
        )


def sandbox() -> str | None:
    """The program that makes it, where this machine has it."""
    return shutil.which("bwrap") if sys.platform == "linux" else None


def _python(settings: str) -> tuple[str, ...]:
    base: str = getattr(sys, "_base_executable", sys.executable)
    return str(Path(base).resolve()), *FLAGS, "-m", MAIN, settings


def _write(path: Path, seat: Seat, bundle: Bundle, control: int, root: str, run: str) -> None:
    """What `inside.main.Settings` reads."""
    given = bundle.settings
    settings = {
        "root": root,
        "entry": bundle.modules[0].name,
        "listener": seat.listener,
        "control": control,
        "outside": f"{run}/out",
        "mark": seat.mark,
        "vars": {name: msgspec.json.decode(text) for name, text in given.vars},
        "secrets": dict(seat.secrets),
        "ai": given.ai,
        "kv": [one.binding for one in given.kv],
        "services": [one.binding for one in given.services],
    }
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.encode(settings))


def _shown(path: Path) -> tuple[str, ...]:
    """A system folder as it is here: many are links into /usr."""
    if path.is_symlink():
        return "--symlink", str(path.readlink()), str(path)
    return ("--ro-bind", str(path), str(path)) if path.is_dir() else ()
