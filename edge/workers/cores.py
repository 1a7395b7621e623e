"""What processors there are for an edge and its Workers, and what is taken of them: those of the
machine, or what its control group leaves (a container's CPU limit; cgroup v2, cpu.max)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class Cores(Protocol):
    @property
    def count(self) -> float: ...

    def used_s(self) -> float:
        """CPU seconds so far, by everybody who shares them."""
        ...


class Machine:
    def __init__(self) -> None:
        self.count = float(os.cpu_count() or 1)

    def used_s(self) -> float:
        """See `Cores`."""
        now = psutil.cpu_times()._asdict()
        idle = ("idle", "iowait", "guest", "guest_nice")  # guests are counted as users already
        return float(sum(spent for kind, spent in now.items() if kind not in idle))


@dataclass(frozen=True, slots=True)
class Group:
    count: float
    stat: Path

    def used_s(self) -> float:
        """See `Cores`. Raises OSError, ValueError."""
        key, spent = self.stat.read_text(encoding="ascii").split(maxsplit=2)[:2]
        if key != "usage_usec":
            raise ValueError(f"{self.stat} begins with {key}")
        return int(spent) / 1e6


def cores_here(groups: Path = _GROUPS, own: Path = _OWN) -> Cores:
    machine = Machine()
    try:
        (line,) = (one for one in own.read_text(encoding="ascii").splitlines() if one[:3] == "0::")
        group = groups / line[3:].lstrip("/")
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        limited = Group(int(quota) / int(period), group / "cpu.stat")  # "max" is no number
        limited.used_s()
    except (OSError, ValueError):
        return machine
    return limited if limited.count < machine.count else machine
