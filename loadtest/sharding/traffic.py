"""Bytes that processes have really put on their TCP connections, as the kernel counts them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection

_PID = re.compile(r"pid=(\d+)")
_SENT = re.compile(r"bytes_sent:(\d+)")


def sent_bytes(pids: Collection[int]) -> int | None:
    """Over all connections that these processes hold open now; None where nobody can tell."""
    ss = shutil.which("ss")
    if ss is None:
        return None
    try:
        listing = subprocess.run(
            [ss, "-tinpOH", "state", "established"],
            capture_output=True, text=True, check=True, timeout=10,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return count(listing, pids)


def count(listing: str, pids: Collection[int]) -> int | None:
    """Out of `ss -tinpOH`, one connection a line. None when it says nothing of bytes."""
    own = [line for line in listing.splitlines() if set(map(int, _PID.findall(line))) & set(pids)]
    found = [match for line in own if (match := _SENT.search(line))]
    return sum(int(match[1]) for match in found) if found else None
