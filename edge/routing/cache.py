"""What an edge believes a region to hold: the region's digest, and what this edge just sent there.

The second part bridges the moment until the region's next digest: a burst of one new prompt finds
the place that already reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.digest import Filter
from core.prefix import ID_BYTES
from core.status import RegionPrefixes

SENT_S = 10.0
SENT_MOST = 2048
NOTHING = Filter()


@dataclass(slots=True)
class _Part:
    """What one router has told."""

    epoch: str = ""
    base: int = -1
    filter: Filter = NOTHING
    added: frozenset[bytes] = frozenset()


class Digest:
    """A region's published digest; `take` brings it up to a frame. Of a region with several routers
    each publishes what it has read itself."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}
        self.losses = 0
        """How often everything that was known became void."""

    def take(self, frame: RegionPrefixes) -> None:
        """A frame on a base whose filter we have not seen brings only what was added."""
        part = self._parts.setdefault(frame.router, _Part())
        if frame.filter is not None:
            part.filter = frame.filter
        elif (frame.epoch, frame.base) != (part.epoch, part.base):
            part.filter = NOTHING
        part.epoch, part.base = frame.epoch, frame.base
        part.added = frozenset(split_ids(frame.added))

    def clear(self) -> None:
        """The region was lost: what it held is not known any more."""
        self.losses += 1
        self._parts.clear()

    def holds(self, one: bytes) -> bool:
        return any(one in part.added or part.filter.holds(one) for part in self._parts.values())


class RegionCache:
    """A region's digest with one edge's own recent sends on top."""

    def __init__(self, digest: Digest) -> None:
        self._digest = digest
        self._sent: OrderedDict[bytes, float] = OrderedDict()
        self._losses = digest.losses

    def sent(self, ids: Sequence[bytes], now: float) -> None:
        self._void()
        sent = self._sent
        for one in ids:
            sent[one] = now
            sent.move_to_end(one)
        while sent and (len(sent) > SENT_MOST or now - next(iter(sent.values())) > SENT_S):
            sent.popitem(last=False)

    def refused(self, ids: Sequence[bytes]) -> None:
        """What was sent came to nothing there."""
        for one in ids:
            self._sent.pop(one, None)

    def overlap(self, ids: Sequence[bytes], now: float) -> int:
        """Blocks from the start of `ids` that the region holds, by bisection: what is held of a
        chain is its beginning. Each look asks for the block before as well: a single look would
        find something that is not there in one bisection of fifteen."""
        self._void()
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            here, before = ids[middle - 1], ids[max(0, middle - 2)]
            if self._holds(here, now) and self._holds(before, now):
                low = middle
            else:
                high = middle - 1
        return low

    def _void(self) -> None:
        if self._losses != self._digest.losses:
            self._losses = self._digest.losses
            self._sent.clear()

    def _holds(self, one: bytes, now: float) -> bool:
        sent_at = self._sent.get(one)
        if sent_at is not None and now - sent_at <= SENT_S:
            return True
        return self._digest.holds(one)


def split_ids(joined: bytes) -> list[bytes]:
    return [joined[at : at + ID_BYTES] for at in range(0, len(joined), ID_BYTES)]


def counts_of(frame: RegionPrefixes) -> Mapping[bytes, float]:
    return dict(zip(split_ids(frame.hot), frame.counts, strict=False))
