"""The processes of one Worker, as the system counts and limits them."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

DATA_FACTOR = 2
"""The kernel's limit, in limits of memory: it stops what fills up between two samples."""
STARTING_MB = 1536
"""More than a runtime ever has of its own, by the kernel's count: V8 sets 570 MB aside."""
FILES = 1024


@dataclass(frozen=True, slots=True)
class Took:
    """What they took so far, together."""

    cpu_s: float = 0.0
    memory_mb: float = 0.0


def tree_of(pid: int) -> list[psutil.Process]:
    """From `pid` down to the innermost process. Raises psutil.NoSuchProcess."""
    tree = [psutil.Process(pid)]
    while children := tree[-1].children():
        tree.append(children[0])
    return tree


def taken_by(tree: Iterable[psutil.Process]) -> Took:
    """Raises psutil.NoSuchProcess."""
    cpu_s, memory = 0.0, 0
    for process in tree:
        with process.oneshot():
            times = process.cpu_times()
            cpu_s += times.user + times.system
            memory += process.memory_info().rss
    return Took(cpu_s, memory / 1e6)


def starting(pid: int, memory_mb: int) -> Took:
    """Of one that is not up yet, whatever wraps it. It is limited loosely from now on, and so is
    what it starts. Nothing for one that has ended."""
    with suppress(psutil.NoSuchProcess):
        tree = tree_of(pid)
        for process in tree:
            _set_data(process.pid, STARTING_MB + (DATA_FACTOR + 1) * memory_mb)
        return taken_by(tree)
    return Took()


def limit(pid: int, memory_mb: int) -> None:
    """Beyond what it takes now."""
    if sys.platform != "linux":
        return
    _set_data(pid, (_data_bytes(pid) >> 20) + 1 + DATA_FACTOR * memory_mb)
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (FILES, FILES))


def _set_data(pid: int, megabytes: int) -> None:
    """Never above what holds. Only Linux lets one do this from outside."""
    if sys.platform != "linux":
        return
    with suppress(ProcessLookupError):
        wanted, (_, hard) = megabytes << 20, resource.prlimit(pid, resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or wanted < hard:
            resource.prlimit(pid, resource.RLIMIT_DATA, (wanted, wanted))


def _data_bytes(pid: int) -> int:
    """What the kernel counts against RLIMIT_DATA."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[5])
    return pages * os.sysconf("SC_PAGE_SIZE")
