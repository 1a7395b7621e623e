"""What is played, by name: the public traces, other deals of the tenant mix, made workloads.

The choice's constants are tuned on `TUNED_ON` up to the middle of each (`half_s`); everything
after it, and everything in `HELD_OUT`, has had no part in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from loadtest.simulator.made import made
from loadtest.simulator.traces import Request, conversation, synthetic, tenant_mix

TUNED_ON: dict[str, Callable[[], list[Request]]] = {
    "conversation": conversation,
    "synthetic": synthetic,
    "tenant mix": tenant_mix,
}
HELD_OUT: dict[str, Callable[[], list[Request]]] = {
    "tenant mix, seed 1": partial(tenant_mix, 1),
    "made, seed 1": partial(made, 1),
    "made, seed 2": partial(made, 2),
}
WORKLOADS = TUNED_ON | HELD_OUT


def half_s(requests: Sequence[Request]) -> float:
    """The middle of a trace, by its own time."""
    return (requests[0].at_s + requests[-1].at_s) / 2
