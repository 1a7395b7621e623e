"""How long to wait before a process that ended is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds: doubled with each early end, from the first again once a process has lived
    `settled_s`."""

    first_s: float = 0.5
    most_s: float = 15.0
    settled_s: float = 30.0

    def after(self, pause_s: float, lived_s: float) -> float:
        """The pause after one of `pause_s` (0 at first) that a life of `lived_s` followed."""
        if pause_s == 0.0 or lived_s >= self.settled_s:
            return self.first_s
        return min(pause_s * 2, self.most_s)


PAUSES = Pauses()
