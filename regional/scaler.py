"""How many nodes of a model should run. Pure: what is seen now and what was wanted before in,
what is wanted now out.

Nothing is asked of a model for `idle_s`: its nodes go down to `least`, which may be none. The first
request that waits brings one back. In between the number follows the wait: up at once where the
wait is too long, at most doubled and not again before those nodes are up; down by one only after
`calm_s` without a moment in which one fewer would have been too few. A load that comes and goes
within that time changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from core.config_scale import Scale

CALM_SHARE = 0.5
"""Of the wait that is allowed: below it one fewer may be enough."""
FILLED_SHARE = 0.7
"""Of the slots that would be left: what runs has to fit into it."""
PAUSE_SHARE = 0.25
"""Of `calm_s`: between two times that nodes are started for their wait."""


class Why(StrEnum):
    """The reason of a wanted number."""

    FIRST_LOOK = "first_look"
    """The router has just started: what is up stays."""
    ASKED = "asked"
    """Somebody waits for a model that is cold."""
    QUEUE = "queue"
    FIRST_TOKEN = "first_token"
    CALM = "calm"
    IDLE = "idle"
    BOUNDS = "bounds"


@dataclass(frozen=True, slots=True)
class Load:
    """A model's nodes of one role at one moment. `there`: in the topology; `up`: joined and not
    draining. `slots`, `sequences`: of those that decode, 0 for others."""

    there: int
    up: int
    waiting: int = 0
    """Requests for the model that have no place."""
    idle_s: float = 0.0
    """Since its last request came or ended; 0 while there is one."""
    queue_s: float = 0.0
    """How long a request that comes now would wait for this role."""
    first_token_s: float = 0.0
    """From arrival to first token, of late; 0 where that says nothing of this role."""
    sequences: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """What is wanted; `raised_at`: when it last went up; `calm_since`: since when one fewer would
    do, None when it would not. Clock readings of one clock."""

    wanted: int
    why: Why = Why.FIRST_LOOK
    raised_at: float = -math.inf
    calm_since: float | None = None


def bounds(scale: Scale, there: int) -> tuple[int, int]:
    """Least and most of a role that has `there` nodes."""
    most = there if scale.most is None else min(scale.most, there)
    return min(scale.least, most), most


def decide(load: Load, scale: Scale, before: Standing | None, now: float) -> Standing:
    """`before` None: nothing was wanted yet."""
    least, most = bounds(scale, load.there)
    if before is None:
        before = Standing(min(max(load.up, least), most))
    wanted = before.wanted
    if not least <= wanted <= most:
        return Standing(min(max(wanted, least), most), Why.BOUNDS, before.raised_at)
    if wanted == 0:
        used = load.up and load.idle_s < scale.idle_s  # another router has had it started
        return Standing(1, Why.ASKED, now) if load.waiting or used else before
    if load.idle_s >= scale.idle_s and not load.waiting:
        return before if wanted == least else Standing(least, Why.IDLE, before.raised_at)
    over, why = _over(load, scale)
    if over > 1.0:
        needed = min(math.ceil(load.up * over), 2 * wanted, most)
        paused = now - before.raised_at < PAUSE_SHARE * scale.calm_s
        if needed > wanted and load.up >= wanted and not paused:
            return Standing(needed, why, now)
        return Standing(wanted, before.why, before.raised_at)
    if wanted <= max(least, 1) or load.up < wanted or not _fewer_would_do(load, wanted, over):
        return Standing(wanted, before.why, before.raised_at)
    since = now if before.calm_since is None else before.calm_since
    if now - since >= scale.calm_s:
        return Standing(wanted - 1, Why.CALM, before.raised_at, now)
    return Standing(wanted, before.why, before.raised_at, since)


def _over(load: Load, scale: Scale) -> tuple[float, Why]:
    """The worst measure as a multiple of what is allowed."""
    queue = load.queue_s / scale.queue_s
    first = load.first_token_s / scale.first_token_s if scale.first_token_s else 0.0
    return (first, Why.FIRST_TOKEN) if first > queue else (queue, Why.QUEUE)


def _fewer_would_do(load: Load, wanted: int, over: float) -> bool:
    left = load.slots * (wanted - 1) / load.up
    return over <= CALM_SHARE and load.sequences <= FILLED_SHARE * left
