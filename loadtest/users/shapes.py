"""How many users there are at a moment of a test. Pure; `locustfile` hands the numbers on."""

from __future__ import annotations

import math
from collections.abc import Callable

Shape = Callable[[float, float, int], int]
"""(seconds since the start, seconds in all, users asked for) → users now."""

SPIKE_FACTOR = 10
SPIKE_SHARE = (0.4, 0.6)
"""Of a spike test: when the crowd comes and when it leaves."""
STEPS = 5


def flat(now_s: float, all_s: float, users: int) -> int:
    return users


def step(now_s: float, all_s: float, users: int) -> int:
    """From a fifth of the users to all of them, in equal steps."""
    done = min(STEPS, int(STEPS * now_s / all_s) + 1)
    return max(1, users * done // STEPS)


def spike(now_s: float, all_s: float, users: int) -> int:
    """`users`, ten times as many from one second to the next, and `users` again."""
    begin, end = SPIKE_SHARE
    return users * (SPIKE_FACTOR if begin <= now_s / all_s < end else 1)


def diurnal(now_s: float, all_s: float, users: int) -> int:
    """One day in the time of the test: a tenth at night, all at noon."""
    share = 0.55 - 0.45 * math.cos(2 * math.pi * now_s / all_s)
    return max(1, round(users * share))


SHAPES: dict[str, Shape] = {"flat": flat, "step": step, "spike": spike, "diurnal": diurnal}
