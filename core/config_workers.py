"""The part of a topology that says how Workers are reached and what one of them may use."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_Domain = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]+(\.[a-z0-9-]+)*$")]


class Workers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits hold for each Worker on each edge."""

    domain: _Domain = "localhost"
    """A Worker NAME answers under NAME.domain, on every edge that has an admin address."""
    zones: tuple[_Domain, ...] = ()
    """Route patterns of Workers may name hosts of these domains, besides those under `domain`."""
    memory_mb: _Positive = 256
    """More than its runtime has when it is empty; beyond it the Worker is ended and started
    again."""
    turn_s: _Seconds = 5.0
    """A Worker that holds its thread for so long is ended and started again."""
    rest_s: _Seconds = 60.0
    """A Worker that is ended again and again is not started for at most so long after each end."""
    answer_s: _Seconds = 120.0
    """The head of an answer has to come within this."""
    concurrency: _Positive = 256
    """Requests that one Worker may have under way in one edge process."""
    idle_s: _Seconds = 900.0
    """A Worker that nobody asks is stopped after this, and started by the next request."""
    trusted: bool = False
    """Python Workers run without a sandbox: they can read what the edge can."""
    fetch: Literal["public", "any", "none"] = "public"
    """Where `fetch` may go: addresses of the public internet, anywhere, or nowhere."""
