"""What a region publishes of prompt beginnings: hot counts and a digest of what it holds.

The edge's text blocks and the engine's token blocks are cut differently, so the region keeps, for
each text block id that came with a request it has read, the hash of the last token block that lies
wholly inside the text so far, by proportion of bytes to tokens. The id counts as held for as long
as some node holds that block, which the router's index knows exactly. **Approximation**: the
proportion may be off by a block or two where one part of a prompt has longer tokens than another.

A new filter is made when enough has been added to the last, or when it is old; in between only the
added ids travel, and evictions are learned from the next filter: a miss costs a prefill, never a
wrong answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from core.digest import MAX_ENTRIES, Filter, build
from core.prefix import ID_BYTES
from core.status import RegionPrefixes
from core.types import BLOCK_TOKENS, GenerateRequest, RegionName
from regional.hot import HotCounter

PUBLISHED_SHARE = 1 / 32
"""÷ regions: of its own requests that a beginning needs for a region to publish it, a quarter of
what makes it hot for all of them (edge.routing.hot)."""
MIN_INTERVAL_S = 0.09
"""Between two publications: a little less than between two status frames."""
COUNTS_EVERY_S = 1.0
"""Hot counts come with one publication a second; the others leave them out."""
FILTER_AGE_S = 20.0
"""A filter older than this is made anew when something changed."""
FILTER_MIN_S = 2.0
MAX_ADDED = 1024
"""Ids on top of a filter; more make a new one."""


def request_ids(request: GenerateRequest) -> list[bytes]:
    """The text block ids that came with a request."""
    joined = request.route_chain
    return [joined[at : at + ID_BYTES] for at in range(0, len(joined), ID_BYTES)]


def standing_blocks(request: GenerateRequest, hashes: Sequence[bytes], tokens: int) -> list[bytes]:
    """For each id of the request, the token block that stands for it; b"" before the first block.

    `hashes` are of the prompt's full blocks, `tokens` its length.
    """
    *ends, whole = request.route_ends or (0,)
    if not whole or not hashes:
        return [b""] * len(ends)
    blocks = (min(end * tokens // whole // BLOCK_TOKENS, len(hashes)) for end in ends)
    return [hashes[block - 1] if block else b"" for block in blocks]


class Prefixes:
    """`holds` says whether any node of the region holds a token block. `share`: of the region's
    requests that a beginning needs to be published."""

    def __init__(
        self,
        region: RegionName,
        epoch: str,
        *,
        holds: Callable[[bytes], bool],
        share: float,
        entries: int = MAX_ENTRIES,
    ) -> None:
        self._region = region
        self._epoch = epoch
        self._holds = holds
        self.share = share
        self._entries = entries
        self._counter = HotCounter()
        self._read: OrderedDict[bytes, bytes] = OrderedDict()
        self._added: dict[bytes, None] = {}
        self._filtered: frozenset[bytes] = frozenset()
        self._missing: set[bytes] = set()
        self._filter = Filter()
        self._base = 1
        self._filter_at = self._published_at = self._counted_at = float("-inf")
        self._changed = False
        self._version = 0
        self._newest = RegionPrefixes(region=region, epoch=epoch, version=0)

    def asked(self, ids: Sequence[bytes], now: float) -> None:
        """A request with this chain came."""
        if ids:
            self._counter.count(ids, now)
            self._changed = True

    def read(self, ids: Sequence[bytes], stands: Sequence[bytes]) -> None:
        """A prompt was read; `stands` as `standing_blocks` gives them."""
        for one, block in zip(reversed(ids), reversed(stands), strict=True):
            if not block:
                continue
            if one not in self._filtered and one not in self._added:
                self._changed = True
                self._added[one] = None
            self._read[one] = block
            self._read.move_to_end(one)
        while len(self._read) > self._entries:
            self._read.popitem(last=False)

    def publication(self, now: float) -> tuple[RegionPrefixes, Filter]:
        """The newest frame, without its filter, and the filter of its `base`."""
        if self._changed and now - self._published_at >= MIN_INTERVAL_S:
            self._publish(now)
        return self._newest, self._filter

    def _renew(self) -> None:
        """A new filter. What is not held stays among the added once and is forgotten the second
        time: a node tells of its blocks a moment after the prompt has been read, and there are
        moments in which the router does not know a node's cache."""
        held = frozenset(one for one, block in self._read.items() if self._holds(block))
        missing = self._read.keys() - held
        for one in missing & self._missing:
            del self._read[one]
        self._missing = missing - self._missing
        self._filter, self._filtered = build(held), held
        self._added = {one: None for one in self._added if one in self._missing}

    def _publish(self, now: float) -> None:
        age = now - self._filter_at
        if age >= FILTER_AGE_S or (len(self._added) > MAX_ADDED and age >= FILTER_MIN_S):
            self._renew()
            self._base += 1
            self._filter_at = now
        self._version += 1
        self._published_at, self._changed = now, False
        frequent: list[tuple[bytes, float]] = []
        counted = now - self._counted_at >= COUNTS_EVERY_S
        if counted:
            self._counted_at = now
            frequent = self._counter.frequent(self.share, now)
        self._newest = RegionPrefixes(
            region=self._region,
            epoch=self._epoch,
            version=self._version,
            base=self._base,
            added=b"".join(list(self._added)[-MAX_ADDED:]),
            hot=b"".join(one for one, _ in frequent),
            counts=tuple(round(count, 2) for _, count in frequent),
            total=round(self._counter.total, 2) if counted else 0.0,
        )
