"""Fixtures that every part shares: free ports, state folders, an end to every started process."""

import os
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

settings.register_profile("skerry", deadline=None)  # an example's time is its neighbours' affair
settings.load_profile("skerry")

os.environ.setdefault("TRITON_INTERPRET", "1")
"""Read when triton is imported, which transformers does too. 0: kernels run on the GPU."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Hundreds of processes are started; each would compile our sources anew."""

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """An empty state folder."""
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder with a short path: Unix socket addresses have about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="sk-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start a program in a process group of its own; the group is killed when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def start(command: Sequence[str], **options: object) -> subprocess.Popen[str]:
        defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process: subprocess.Popen[str] = subprocess.Popen(
            list(command),
            start_new_session=True,
            **{**defaults, **options},  # type: ignore[call-overload]  # options of Popen itself
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


class ByWorld(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """A file stays in one process, and so do all files that use the same running world: each is
    started once."""

    def _split_scope(self, nodeid: str) -> str:
        return _together(nodeid.split("::", 1)[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByWorld | None:
    return ByWorld(config, log) if config.getvalue("dist") == "loadfile" else None


@cache
def _together(path: str) -> str:
    """The world of tests/world/conftest.py that the file's tests ask for; the file, if none."""
    file = Path(__file__).parents[1] / path
    if file.parent.name != "world":
        return path
    text = file.read_text(encoding="utf-8")
    wanted = " ".join(re.findall(r"^def test_\w+\(([^)]*)\)", text, re.MULTILINE))
    for name in ("real", "world"):
        if f"{name}: LocalWorld" in wanted and f"def {name}(" not in text:
            return name
    return path


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: whole worlds wait for each other most of their time."""
    return min(4, (os.cpu_count() or 1) + 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the suite (`pytest -n 2`), whole worlds come first, and of them
    those that many files use, so that no process ends long after others."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        path = item.path.relative_to(config.rootpath).as_posix()
        return "world" not in path, _together(path) == path

    if os.environ.get("PYTEST_XDIST_WORKER") or config.getoption("numprocesses", None):
        items.sort(key=place)
