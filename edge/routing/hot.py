"""The hot set: prompt beginnings that too many prompts share to tell them apart.

Every region publishes what it counts; every edge adds up the counts of *all* regions, so that a
beginning does not turn cold by being spread. A beginning becomes hot above 1/(8 × regions) of all
prompts and at least 8 of them, cold again below half of that, and keeps its state for 60 s. The
set's version is a hash of its members: edges of one version make the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from core.types import RegionName

LEAST_PROMPTS = 8.0
DWELL_S = 60.0
FORGET_S = 120.0
"""Counts of a region that has been silent for this long are no longer added."""


@dataclass(frozen=True, slots=True)
class HotSet:
    ids: frozenset[bytes] = frozenset()
    version: str = "0"


@dataclass(frozen=True, slots=True)
class _Said:
    counts: Mapping[bytes, float]
    total: float
    at: float


def share_of(regions: int) -> float:
    """The part of all prompts above which a beginning is hot."""
    return 1.0 / (8.0 * regions)


def version_of(ids: frozenset[bytes]) -> str:
    if not ids:
        return "0"
    return blake2b(b"".join(sorted(ids)), digest_size=4).hexdigest()


class HotSets:
    """Merges the regions' counts; `current` is what keys are made with. Time is passed in."""

    def __init__(self, regions: int) -> None:
        self._share = share_of(regions)
        self._said: dict[RegionName, _Said] = {}
        self._since: dict[bytes, float] = {}
        """When a hot id became hot, and when one that has cooled cooled, for the dwell."""
        self._current = HotSet()

    @property
    def current(self) -> HotSet:
        return self._current

    def take(
        self, region: RegionName, counts: Mapping[bytes, float], total: float, now: float
    ) -> None:
        """A region's newest counts replace its last."""
        self._said[region] = _Said(counts, total, now)

    def settle(self, now: float) -> HotSet:
        """Decide anew from the counts as they are."""
        for region in [r for r, said in self._said.items() if now - said.at > FORGET_S]:
            del self._said[region]
        total = sum(said.total for said in self._said.values())
        sums: dict[bytes, float] = {}
        for said in self._said.values():
            for one, count in said.counts.items():
                sums[one] = sums.get(one, 0.0) + count
        enter = max(total * self._share, LEAST_PROMPTS)
        hot = set(self._current.ids)
        for one, count in sums.items():
            if one not in hot and count > enter and self._rested(one, now):
                hot.add(one)
                self._since[one] = now
        for one in self._current.ids:
            if sums.get(one, 0.0) < enter / 2 and self._rested(one, now):
                hot.remove(one)
                self._since[one] = now
        for one in [o for o, at in self._since.items() if o not in hot and now - at >= DWELL_S]:
            del self._since[one]
        if hot != self._current.ids:
            ids = frozenset(hot)
            self._current = HotSet(ids, version_of(ids))
        return self._current

    def _rested(self, one: bytes, now: float) -> bool:
        since = self._since.get(one)
        return since is None or now - since >= DWELL_S
