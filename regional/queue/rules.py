"""What happens with a queued request. Pure: states in, decisions out.

::

    queued ──claim──▶ running ──ended──▶ answered
      ▲                  │
      └──given way, or a failure that passes, or a restart

An item that has failed `MAX_TRIES` times, by restarts of the router too, is answered with its
failure: whatever takes a region down must not do so for ever. One that gave way has not failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from core.errors import IncompleteStream, InternalError, from_fault, to_fault
from core.events import Accepted, Delta, Done, Event, Fault, Finish, Moved, ToolCallDelta

MAX_TRIES = 5
PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Before an item is tried again: doubled with each failure."""
SHARE = 0.5
"""Of the region's decode slots that queued requests may hold, at the most."""


class ItemState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    ANSWERED = "answered"


@dataclass(frozen=True, slots=True)
class Answered:
    """`events` end in a Done or a Fault."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Again:
    """Queue it again, `tries` failures so far, not before `pause_s` are over."""

    tries: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Room:
    """The region at one moment. `waiting`: requests that wait for a place and are not queued
    ones; `held`: sequences of the queue that run."""

    slots: int
    taken: int
    waiting: int
    held: int
    draining: bool = False


def room(view: Room) -> int:
    """How many more queued requests may start: negative where so many should give way."""
    if view.draining or view.waiting:
        return -view.held
    most = max(1, int(view.slots * SHARE)) if view.slots else 0
    return min(most - view.held, max(0, view.slots - view.taken))


def ended(events: Sequence[Event], tries: int) -> Answered | Again:
    """What follows from the stream of one run; `tries`: failures before it."""
    end = events[-1] if events else None
    if isinstance(end, Done):
        return Answered(joined(events))
    if not isinstance(end, Fault):
        end = to_fault(IncompleteStream("the answer stopped without its end"))
    error = from_fault(end)
    if not (error.retryable or isinstance(error, InternalError)) or tries + 1 >= MAX_TRIES:
        return Answered((end,))
    return again(tries, end.retry_after_s)


def again(tries: int, at_least_s: float | None = None) -> Again:
    """After one more failure."""
    pause_s = min(PAUSE_S * 2.0**tries, MAX_PAUSE_S)
    return Again(tries + 1, max(pause_s, at_least_s or 0.0))


def after_restart(tries: int) -> Answered | Again:
    """Of an item that ran when its router went down."""
    if tries + 1 >= MAX_TRIES:
        error = InternalError(f"the request was begun {MAX_TRIES} times and never ended")
        return Answered((to_fault(error),))
    return Again(tries + 1, 0.0)


def joined(events: Sequence[Event]) -> tuple[Event, ...]:
    """The same answer in one delta for each choice, without token ids."""
    texts: dict[int, list[str]] = {}
    reasoning: dict[int, list[str]] = {}
    calls: dict[int, list[ToolCallDelta]] = {}
    ends: list[Event] = []
    for event in events:
        if isinstance(event, Delta):
            texts.setdefault(event.choice, []).append(event.text)
            reasoning.setdefault(event.choice, []).append(event.reasoning)
            calls.setdefault(event.choice, []).extend(event.tool_calls)
        elif isinstance(event, Finish | Done | Fault):
            ends.append(event)
        else:
            assert isinstance(event, Accepted | Moved), "a closed union"
    deltas = [
        Delta(
            choice=choice,
            text="".join(pieces),
            tool_calls=tuple(calls[choice]),
            reasoning="".join(reasoning[choice]),
        )
        for choice, pieces in texts.items()
    ]
    return (*deltas, *ends)
