"""How long a node takes to start, by its process and its own log."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import psutil

from loadtest.edge.cast import NotStarted
from loadtest.kv.restart import World

JOINED = re.compile(r"^(\S+) .* joined the router", re.MULTILINE)


def start_s(here: World, name: str = "home-1") -> float:
    """Of the node that is up: from its process to its word that it has joined."""
    pid = node_pid(here, name)
    log = here.slabs.parent / "logs" / f"{name}.log"
    found = JOINED.findall(log.read_text(encoding="utf-8"))
    if not found:
        raise NotStarted(f"{log} does not say that the node has joined")
    return datetime.fromisoformat(found[-1]).timestamp() - born(pid)


def node_pid(here: World, name: str = "home-1") -> int:
    """Raises NotStarted when the node is off."""
    pid = here.node(name)["pid"]
    if not isinstance(pid, int) or not pid:
        raise NotStarted("the node is off again before it was looked at")
    return pid


def alive(pids: Sequence[int]) -> bool:
    """Whether one of these is still on its way out; a node is started again only after that."""
    return any(psutil.pid_exists(pid) for pid in pids)


def born(pid: int) -> float:
    """When a process began, in Unix seconds. psutil takes the start of the system in whole seconds,
    by a clock that may have been set since: up to a second off, which is what is measured."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return float(psutil.Process(pid).create_time())
    ticks = int(stat.rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
