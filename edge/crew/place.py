"""What a crew has to itself on its machine: the address, and a folder for its workers' sockets."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from core.address import split_address
from core.errors import ConfigError

_log = logging.getLogger("skerry.crew")

_PREFIX = "skerry-edge-"
_LOCK = "lock"
"""Locked for as long as the folder's owner lives, however it ends."""


@contextmanager
def reserved(listen: str) -> Iterator[str]:
    """The address with its port, ours until the end. Raises ConfigError when anybody has it.

    Whoever sets SO_REUSEPORT may share a port with another crew of the same user, so it is bound
    once without; and since two that start together may both find it free, a crew also locks a file
    of the port's. SO_REUSEADDR is for connections of an edge that was here before: those in
    TIME_WAIT would keep a port from us for a minute.
    """
    host, port = split_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as alone, socket.socket(family) as holder, ExitStack() as locks:
        try:
            for one in (alone, holder):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port:
                locks.enter_context(_port_lock(port))
            alone.bind((host, port))
            if not port:
                port = alone.getsockname()[1]
                locks.enter_context(_port_lock(port))
            alone.close()
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{listen} cannot be listened on: {error.strerror}") from error
        shown = f"[{host}]" if ":" in host else host
        yield f"{shown}:{port}"


@contextmanager
def shared(listen: str) -> Iterator[str]:
    """The same beside another crew of ours that has it still and is about to leave: from then on
    nobody else can bind it. Raises ConfigError."""
    host, port = split_address(listen)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        try:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                holder.setsockopt(socket.SOL_SOCKET, option, 1)
            holder.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{listen} cannot be shared: {error.strerror}") from error
        yield listen


@contextmanager
def _port_lock(port: int) -> Iterator[None]:
    """Raises OSError: another crew of ours holds the port, or is about to. The file stays: to
    remove it would let two crews lock two files of one name."""
    path = Path(tempfile.gettempdir()) / f"{_PREFIX}port-{os.getuid()}-{port}"
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(path, flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from None
    finally:
        os.close(file)


@contextmanager
def private_folder(parent: Path | None = None) -> Iterator[Path]:
    """Only ours to read, and gone at the end; those of crews that were killed go first.

    A short path in the system's folder for temporary files, unless `parent` says otherwise:
    addresses of Unix sockets have about a hundred characters.
    """
    where = parent or Path(tempfile.gettempdir())
    sweep(where)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=where))
    with (folder / "new").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "new").rename(folder / _LOCK)  # never seen unlocked while we live
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def sweep(where: Path) -> None:
    """Remove this user's folders whose owner is gone. One without a lock is just being made."""
    for folder in where.glob(f"{_PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        except (FileNotFoundError, NotADirectoryError, BlockingIOError):
            continue
        except OSError as error:
            _log.warning("folder of a crew that is gone stays path=%s why=%s", folder, error)
