"""Which Worker holds its thread, and whether the machine is short of cores. Pure.

A priority alone does not keep a loop from its neighbours where they share a few cores: what
computes beside them costs them caches and wake-ups even at the lowest one. On a crowded machine a
Worker that holds its thread therefore gets short slices of a core, with longer rests between them:
no request of a neighbour meets more than a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

HOLDS_S = 0.05
"""Computing for so long without waiting for anything is holding the thread."""
RUNS_SHARE = 0.25
"""Of a core: who gets less is not computing, or could not hurt anybody."""
GO_S, HALT_S = 0.002, 0.006
FULL = 0.75
"""Of the cores: with more than this wanted, the machine is crowded."""
WEIGHT = 0.3
"""Of the newest measurement."""


@dataclass(frozen=True, slots=True)
class Look:
    """CPU time since the process's start, and how often its first thread has waited for anything by
    itself."""

    now: float
    cpu_s: float
    waits: int


class Hold:
    """Of one process: for how long it has computed without waiting."""

    def __init__(self, first: Look) -> None:
        self._last = first
        self.held_s = 0.0

    def see(self, now: float, cpu_s: float, waits: Callable[[], int]) -> None:
        """`waits` is asked for only where the CPU time does not settle it."""
        last = self._last
        spent_s = now - last.now
        if cpu_s - last.cpu_s < RUNS_SHARE * spent_s:
            self._last, self.held_s = Look(now, cpu_s, last.waits), 0.0
            return
        look = Look(now, cpu_s, waits())
        self.held_s = self.held_s + spent_s if look.waits == last.waits else 0.0
        self._last = look

    @property
    def holds(self) -> bool:
        return self.held_s >= HOLDS_S


class Room:
    """What everybody else takes of the cores."""

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._others = 0.0

    def see(self, spent_s: float, used_s: float, own_s: float) -> None:
        """In `spent_s` everybody has computed `used_s`, and those who hold their threads `own_s` of
        it."""
        others = max(0.0, used_s - own_s) / spent_s
        self._others += WEIGHT * (others - self._others)

    def crowded(self, holding: int) -> bool:
        """Whether `holding` Workers with a core each leave too little to the others."""
        return self._others + holding > FULL * self._cores
