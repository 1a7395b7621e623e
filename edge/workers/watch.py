"""When a Worker's process has had enough. Pure: samples in, a verdict out."""

from __future__ import annotations

from dataclasses import dataclass

from core.config_workers import Workers
from edge.workers.rest import Cause

BUSY_S, BUSY_SHARE = 0.4, 0.9
"""Of a core, for so long: then it gives way to everybody else."""
CALM_S, CALM_SHARE = 5.0, 0.5
"""So long it has to be below this share until it has its priority back."""
LOOP_SHARE = 0.5
"""Of the limit of a turn, as CPU time since it answered last: then it loops, and does not only wait
for a busy machine."""
AWAY_S = 1.5
"""Nobody has asked it for so long: then it was its host that the machine kept away, and its silence
is counted from the first question that it left open."""
HANGS_FACTOR = 6.0
"""So many times the limit of a turn may pass without an answer where it uses little CPU."""


@dataclass(frozen=True, slots=True)
class Sample:
    """`answered`: whether it answered its host just now. `cpu_s`: CPU time since its start, and the
    time for which it was kept from computing while it held its thread. `others`:
    processes that it started, as far as was looked."""

    now: float
    cpu_s: float
    memory_mb: float
    answered: bool
    others: int = 0


@dataclass(frozen=True, slots=True)
class Fine:
    pass


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Lower its priority."""


@dataclass(frozen=True, slots=True)
class Recover:
    """Give it its priority back."""


@dataclass(frozen=True, slots=True)
class End:
    """`cause`: None for an end that is no fault of the Worker's conduct."""

    reason: str
    cause: Cause | None = None


Verdict = Fine | GiveWay | Recover | End


class Watch:
    """Of one process, from `first` on, which is a sample of it while it is empty."""

    def __init__(self, limits: Workers, first: Sample, turn_s: float | None = None) -> None:
        self._limits = limits
        self._turn_s = limits.turn_s if turn_s is None else min(turn_s, limits.turn_s)
        self._empty_mb = first.memory_mb
        self._since = self._heard = first
        self._silent = False
        self._lowered = False
        self._calm_s = 0.0

    @property
    def hasty(self) -> bool:
        """Whether the next sample is worth taking soon: it was silent just now."""
        return self._silent

    def see(self, sample: Sample) -> Verdict:
        asked_late = not self._silent and sample.now - self._heard.now > AWAY_S
        self._silent = not sample.answered
        if sample.answered or asked_late:
            self._heard = sample
        if sample.others:
            return End(
                "it started processes, which a Worker may not: no limit counts them", "processes"
            )
        used_mb = sample.memory_mb - self._empty_mb
        if used_mb > self._limits.memory_mb:
            return End(
                f"it filled its memory: {used_mb:.0f} MB, and the limit is"
                f" {self._limits.memory_mb} MB (workers.memory_mb)",
                "memory",
            )
        silent_s = sample.now - self._heard.now
        busy_s = sample.cpu_s - self._heard.cpu_s
        if silent_s >= self._turn_s and busy_s >= self._turn_s * LOOP_SHARE:
            return End(
                f"it held its thread for {silent_s:.1f} s, as a loop without an end does; the limit"
                f" is {self._turn_s:g} s (workers.turn_s, or limits.cpu_ms of the Worker)",
                "loop",
            )
        if silent_s >= self._turn_s * HANGS_FACTOR:
            return End(f"it did not answer its host for {silent_s:.0f} s", "silent")
        return self._priority(sample)

    def _priority(self, sample: Sample) -> Verdict:
        spent_s = sample.now - self._since.now
        if spent_s < BUSY_S:
            return Fine()
        share = (sample.cpu_s - self._since.cpu_s) / spent_s
        self._since = sample
        if share >= BUSY_SHARE:
            self._lowered, self._calm_s = True, 0.0
            return GiveWay()
        self._calm_s = self._calm_s + spent_s if share < CALM_SHARE else 0.0
        if self._lowered and self._calm_s >= CALM_S:
            self._lowered = False
            return Recover()
        return Fine()
