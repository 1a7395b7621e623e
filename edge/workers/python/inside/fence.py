"""Clear refusals of what a Worker may not do. What holds it in is the sandbox around the process:
this only says so in words, where an operation would fail in a puzzling way or would succeed in a
world that trusts its Workers."""

from __future__ import annotations

import sys
from typing import Any

_PROCESSES = frozenset({
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn",
    "subprocess.Popen",
})  # fmt: skip
_THREADS = frozenset({"_thread.start_new_thread", "_thread.start_joinable_thread"})
_NETWORK = frozenset({
    "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
})  # fmt: skip


def raise_fence(way_out: str) -> None:
    """For the rest of the process: a hook cannot be taken back. `way_out` is the host's socket."""

    def look(event: str, given: tuple[Any, ...]) -> None:
        if event in _PROCESSES:
            raise PermissionError(f"a Worker starts no processes ({event})")
        if event in _THREADS:
            raise RuntimeError("a Worker has one thread; use asyncio")
        if event in _NETWORK or (event == "socket.connect" and given[1] != way_out):
            raise PermissionError("a Worker has no network but fetch")

    sys.addaudithook(look)
