"""A region as one edge sees it at one moment: what a choice is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.status import ModelStatus, RegionStatus
from core.types import ModelName, RegionName

UNMEASURED_TOKENS_PER_S = 1000.0


class Cache(Protocol):
    """What an edge believes a region to hold."""

    def overlap(self, ids: Sequence[bytes], now: float) -> int: ...


@dataclass(frozen=True, slots=True)
class RegionView:
    """A region as an edge sees it at one moment.

    `status` None: never heard of. `age_s` is the time since its last frame. `fresh`: connected and
    heard of within `core.status.STALE_S`. `broken`: attempts there failed lately. `sent_s`: work
    that this edge sent and the status cannot show yet; `drained_s`: what of the published has been
    worked off since. `ramp`:
    share of its fair load that it should bear now; `returned`: it came back lately. `at`: the
    edge's clock at that moment.
    """

    name: RegionName
    round_trip_s: float
    configured: frozenset[ModelName]
    """The models that the topology gives it."""
    fresh: bool = False
    age_s: float | None = None
    status: RegionStatus | None = None
    cache: Cache | None = None
    broken: bool = False
    sent_s: float = 0.0
    drained_s: float = 0.0
    ramp: float = 1.0
    returned: bool = False
    weight: int = 100
    at: float = 0.0

    @property
    def work_s(self) -> float:
        return self.wait_s + (self.status.decode_work_s if self.status else 0.0)

    @property
    def wait_s(self) -> float:
        """Before a prompt that comes now is begun: the prompts that are in front of it."""
        if self.status is None:
            return self.sent_s
        # A region whose readers are busy counts their backlog into its queue's time as well.
        published = max(self.status.prefill_work_s, self.status.queue_s)
        return max(0.0, published - self.drained_s) + self.sent_s

    @property
    def distance_s(self) -> float:
        """What a request waits before a region begins with it."""
        return self.round_trip_s + self.wait_s

    @property
    def usable(self) -> bool:
        """In its full rights; others come last."""
        return self.fresh and not self.broken

    def serves(self, model: ModelName) -> bool:
        """As far as we know: a fresh status is believed, else the topology."""
        if self.fresh and self.status is not None:
            return self._model(model) is not None
        return model in self.configured

    def reads_per_s(self, model: ModelName) -> float:
        """Prompt tokens a second."""
        known = self._model(model)
        rate = known.prefill_tokens_per_s if known else 0.0
        return rate if rate > 0 else UNMEASURED_TOKENS_PER_S

    def start_s(self, model: ModelName) -> float:
        """Until a node of it is up: 0 where one is."""
        known = self._model(model)
        return known.start_s if known else 0.0

    @property
    def draining(self) -> bool:
        return self.fresh and self.status is not None and self.status.draining

    def _model(self, name: ModelName) -> ModelStatus | None:
        if self.status is None:
            return None
        return next((one for one in self.status.models if one.name == name), None)
