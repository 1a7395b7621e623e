"""When a Worker's process has had enough. Pure: samples in, a verdict out."""

from __future__ import annotations

from dataclasses import dataclass

from core.config_workers import Workers

BUSY_SHARE = 0.9
"""Of a core, from one sample to the next: then it gives way to everybody else from now on."""
LOOP_SHARE = 0.5
"""Of the limit of a turn, as CPU time since it answered last: then it loops, and does not only wait
for a busy machine."""
HANGS_FACTOR = 6.0
"""So many times the limit of a turn may pass without an answer where it uses little CPU."""


@dataclass(frozen=True, slots=True)
class Sample:
    """`answered`: whether it answered its host just now. CPU time since its start. `others`:
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
class End:
    reason: str


Verdict = Fine | GiveWay | End


class Watch:
    """Of one process, from `first` on, which is a sample of it while it is empty."""

    def __init__(self, limits: Workers, first: Sample, turn_s: float | None = None) -> None:
        self._limits = limits
        self._turn_s = limits.turn_s if turn_s is None else min(turn_s, limits.turn_s)
        self._empty_mb = first.memory_mb
        self._before = self._heard = first

    def see(self, sample: Sample) -> Verdict:
        before, self._before = self._before, sample
        if sample.answered:
            self._heard = sample
        if sample.others:
            return End("it started processes, which a Worker may not: no limit counts them")
        used_mb = sample.memory_mb - self._empty_mb
        if used_mb > self._limits.memory_mb:
            return End(
                f"it filled its memory: {used_mb:.0f} MB, and the limit is"
                f" {self._limits.memory_mb} MB (workers.memory_mb)"
            )
        silent_s = sample.now - self._heard.now
        busy_s = sample.cpu_s - self._heard.cpu_s
        if silent_s >= self._turn_s and busy_s >= self._turn_s * LOOP_SHARE:
            return End(
                f"it held its thread for {silent_s:.1f} s, as a loop without an end does; the limit"
                f" is {self._turn_s:g} s (workers.turn_s, or limits.cpu_ms of the Worker)"
            )
        if silent_s >= self._turn_s * HANGS_FACTOR:
            return End(f"it did not answer its host for {silent_s:.0f} s")
        spent_s = sample.now - before.now
        if spent_s > 0 and sample.cpu_s - before.cpu_s >= spent_s * BUSY_SHARE:
            return GiveWay()
        return Fine()
