"""The constants of the choice that are judgement, not mathematics, in one place.

They were chosen with `python -m loadtest.simulator.tune` on the first half of each trace alone;
`make bench-routing` judges them on the second halves, on other seeds and on a made workload.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weights:
    read: float = 5.0
    """A second of reading costs more than a second of waiting: the prompts behind wait for it too,
    and its blocks push others out of the cache. With 1 a request runs away from a short queue at
    the place that holds its prefix, and everybody's time to the first token grows."""
    home_slack: float = 0.1
    """Of the time that its reading takes: what a prompt that nobody holds may lose by going home,
    waiting there included. More, and cold prompts would not even out the load any more."""
    homing_s: float = 0.1
    """The mean cost to a request of bringing a hot prefix home that lives elsewhere."""
    homing_back_s: float = 1.0
    """The same, of any prefix, while its home gathers again what it lost."""
    drain: float = 0.7
    """Of the time since a region spoke: what it has worked off, less what came meanwhile from
    edges that we do not hear."""


WEIGHTS = Weights()
