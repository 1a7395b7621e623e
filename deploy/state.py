"""The state folder of a world: `.skerry/WORLD/` with secrets, logs, the resolved topology.

A lock says that a world runs on it. The lock belongs to the launcher's process: it is free again
the moment that process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from core.errors import ConfigError

FOLDER = Path(".skerry")
DEFAULT_EDGE = "http://127.0.0.1:8787"
BESIDE = 9
"""Worlds of one name that may run beside each other."""

MARKS = (
    "lock", "current.json", "region.secret", "fleet.secret", "keys.jsonl",
    "keys.jsonl.made", "budgets.counts", "usage",
)  # fmt: skip
"""What tells a state folder from any other one: `skerry up` or `skerry keys` made it."""
_ELSEWHERE = "elsewhere-"
_RUN = re.compile(r"run-\d{8}-\d{6}")

Say = Callable[[str], None]


class Current(msgspec.Struct, frozen=True):
    """`current.json`: the world that runs on a state folder, for `skerry chat` and `status`."""

    pid: int
    edges: dict[str, str]
    """URL of each edge by name."""
    regions: dict[str, str]
    topology: str = ""
    """The resolved topology's file."""
    control: str = ""
    """Where `skerry up` is asked for changes."""


def folder_name(world: str) -> str:
    """A folder's name for a world's: `.skerry/` + this is where its state is by default."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", world).strip("-") or "world"


class StateFolder:
    """A state folder that is ours for as long as `lock` is open."""

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self.logs = path / "logs"
        self.run = path / time.strftime("run-%Y%m%d-%H%M%S")
        self._lock = lock
        for old in path.iterdir():
            if _RUN.fullmatch(old.name) and old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
        self.logs.mkdir(exist_ok=True)
        self.run.mkdir()

    def record(
        self,
        edges: Mapping[str, str],
        regions: Mapping[str, str],
        topology: Path | None = None,
        control: Path | None = None,
    ) -> None:
        """`topology`: where it is written, by default in the folder of this run."""
        current = Current(
            pid=os.getpid(), edges=dict(edges), regions=dict(regions),
            topology=str((topology or self.run / "topology.toml").resolve()),
            control=str(control or ""),
        )  # fmt: skip
        fresh = self.path / "current.json.new"
        fresh.write_bytes(msgspec.json.encode(current))
        os.replace(fresh, self.path / "current.json")

    def release(self) -> None:
        (self.path / "current.json").unlink(missing_ok=True)
        self._lock.close()


@contextmanager
def claim(folder: Path, marks: Collection[str] = ()) -> Iterator[StateFolder]:
    """Hold `folder`. Raises ConfigError when another world runs on it, and when it holds something
    but none of `MARKS` or `marks`: a folder of somebody else's."""
    state = _try_claim(folder, marks)
    if state is None:
        raise ConfigError(
            f"a world runs on {folder} (process {_holder(folder)}); stop it, or take another "
            "folder with --state"
        )
    try:
        yield state
    finally:
        state.release()


@contextmanager
def claim_any(
    root: Path, world: str, say: Say, marks: Collection[str] = ()
) -> Iterator[StateFolder]:
    """Hold `root/world`, or `root/world-2`… when worlds of that name run already."""
    for number in range(1, BESIDE + 1):
        folder = root / (world if number == 1 else f"{world}-{number}")
        state = _try_claim(folder, marks)
        if state is None:
            continue
        if number > 1:
            say(f"another {world} runs already: this one keeps its state in {folder}")
        try:
            yield state
        finally:
            state.release()
        return
    raise ConfigError(f"{BESIDE} worlds named {world!r} run under {root}; stop one of them")


@contextmanager
def found_from(root: Path, folder: Path, say: Say) -> Iterator[None]:
    """A running world whose folder is not under `root` is found there too, by a link, so that
    commands without options mean it."""
    link = (
        root / f"{_ELSEWHERE}{hashlib.blake2b(bytes(folder.resolve()), digest_size=6).hexdigest()}"
    )
    if folder.parent.resolve() == root.resolve():
        yield
        return
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in root.glob(f"{_ELSEWHERE}*"):
            if old.is_symlink() and current_of(old) is None:
                old.unlink(missing_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(folder.resolve(), target_is_directory=True)
    except OSError as error:
        say(f"commands need --state {folder}: {link} cannot be made: {error.strerror}")
    try:
        yield
    finally:
        with suppress(OSError):  # a link that stays leads to no running world, and is taken away
            link.unlink(missing_ok=True)


def running(root: Path) -> Iterator[Current]:
    """The worlds that run under `root` now, by the names of their state folders."""
    yield from running_folders(root).values()


def running_folders(root: Path) -> dict[Path, Current]:
    """The state folders under `root` whose worlds run now. Where there are none and `root` is
    relative: those of the nearest folder above this one, so that a Worker's folder finds its world.
    """
    found = _running_in(root)
    if found or root.is_absolute():
        return found
    above = (parent / root for parent in Path.cwd().parents)
    return next(filter(None, (_running_in(one) for one in above if _is_ours(one))), {})


def _is_ours(folder: Path) -> bool:
    """Nobody else may lead our commands to a world of theirs by a folder in, say, /tmp."""
    try:
        return folder.stat().st_uid == os.getuid()
    except OSError:
        return False


def _running_in(root: Path) -> dict[Path, Current]:
    folders = (_itself(path.parent) for path in sorted(root.glob("*/current.json")))
    return {folder: current for folder in folders if (current := current_of(folder)) is not None}


def _itself(folder: Path) -> Path:
    return folder.resolve() if folder.is_symlink() else folder


def last_topology(folder: Path) -> Path | None:
    """What the world on `folder` ran with last, or runs with: the newest file of its last run."""
    runs = sorted(one for one in folder.glob("run-*") if _RUN.fullmatch(one.name))
    files = runs[-1].glob("topology*.toml") if runs else ()
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)


def current_of(folder: Path) -> Current | None:
    """The world that runs on `folder` now."""
    try:
        current = msgspec.json.decode((folder / "current.json").read_bytes(), type=Current)
        os.kill(current.pid, 0)
    except (OSError, msgspec.MsgspecError):  # none, ended, being written, or of another release
        return None
    return current


def running_topology(state: Path | None, root: Path = FOLDER) -> Path:
    """The file that the running world was started from, as it was resolved. Raises ConfigError."""
    found = [current_of(state)] if state is not None else list(running(root))
    files = [one.topology for one in found if one is not None and one.topology]
    if len(files) != 1:
        what = "no world runs" if not files else f"{len(files)} worlds run"
        raise ConfigError(
            f"{what} on {state or root}; say which one with --state, or give two files"
        )
    return Path(files[0])


def first_edge(root: Path = FOLDER) -> str:
    """The first edge of the first world that runs under `root`, else the usual address."""
    return edges_of_first(root)[0]


def edges_of_first(root: Path = FOLDER) -> list[str]:
    """All edges of that world, the first one first."""
    return next((list(world.edges.values()) for world in running(root) if world.edges), None) or [
        DEFAULT_EDGE
    ]


def all_edges(root: Path = FOLDER) -> list[str]:
    """The edges of all worlds that run under `root`, else the usual address."""
    return [url for world in running(root) for url in world.edges.values()] or [DEFAULT_EDGE]


def _try_claim(folder: Path, marks: Collection[str]) -> StateFolder | None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _refuse_foreign(folder, {*MARKS, *marks})
        lock = (folder / "lock").open("a+", encoding="ascii")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used as state folder: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return StateFolder(folder, lock)


def _refuse_foreign(folder: Path, marks: Collection[str]) -> None:
    held = {entry.name for entry in folder.iterdir()}
    if held and not held & set(marks):
        raise ConfigError(
            f"{folder} is neither empty nor a state folder of Skerry's; give another with --state"
        )
    lock = folder / "lock"
    if lock.exists() and not re.fullmatch(rb"\d*", lock.read_bytes()):
        raise ConfigError(f"{lock} is not Skerry's; give another folder with --state")


def _holder(folder: Path) -> str:
    return (folder / "lock").read_text(encoding="ascii") or "unknown"
