"""A region in virtual time: one reader that takes prompts in the order of their arrival, an LRU
cache of blocks, answers that run beside it, and what it publishes.

Reading one after the other at one rate stands for chunked prefill in any number of nodes: the
region's wait and throughput are what routing sees of it. A prompt's blocks can be reused by
whatever is read after it, and are published once it has been read.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from core.digest import Filter
from core.prefix import ID_BYTES
from core.status import ModelStatus, RegionPrefixes, RegionStatus
from core.types import ModelName, RegionName
from loadtest.simulator.traces import Request
from regional.prefixes import PUBLISHED_SHARE, Prefixes

MODEL = ModelName("model")
ANSWER_TOKENS_PER_S = 60.0
SLOTS = 64


class Site:
    def __init__(self, name: RegionName, *, blocks: int, tokens_per_s: float, regions: int) -> None:
        self.name = name
        self.served = 0
        self.read_tokens = 0
        self._blocks = blocks
        self._tokens_per_s = tokens_per_s
        self._regions = regions
        self._epoch = 0
        self._sequence = 0
        self._models = (
            ModelStatus(
                name=MODEL,
                context=1 << 20,
                prefill_tokens_per_s=tokens_per_s,
                decode_tokens_per_s=ANSWER_TOKENS_PER_S,
            ),
        )
        self._start(0.0)

    def _start(self, now: float) -> None:
        self._epoch += 1
        self._free_at = now
        self._cache: OrderedDict[bytes, None] = OrderedDict()
        self._answers: list[float] = []
        self._reading: list[tuple[float, int, Request]] = []
        self._told_base = 0
        self._prefixes = Prefixes(
            self.name,
            str(self._epoch),
            holds=self._cache.__contains__,
            share=PUBLISHED_SHARE / self._regions,
        )

    def restart(self, now: float) -> None:
        """As after a crash: nothing is cached, nothing waits."""
        self._start(now)

    def take(self, request: Request, arrived: float) -> tuple[float, int]:
        """(when its first token is made, tokens that were not computed). Arrivals in order."""
        held = self._match(request.blocks)
        cached = request.covered(held)
        uncached = max(1, request.tokens - cached)
        self._free_at = max(self._free_at, arrived) + uncached / self._tokens_per_s
        self._keep(request.blocks)
        self.served += 1
        self.read_tokens += uncached
        heapq.heappush(self._reading, (self._free_at, self.served, request))
        heapq.heappush(self._answers, self._free_at + request.answer_tokens / ANSWER_TOKENS_PER_S)
        self._prefixes.asked(request.chain.ids(), arrived)
        return self._free_at, cached

    def publish(self, now: float) -> tuple[RegionStatus, RegionPrefixes]:
        """What its status stream says at `now`; the filter comes when it is a new one."""
        while self._reading and self._reading[0][0] <= now:
            chain = heapq.heappop(self._reading)[2].chain
            stands: Sequence[bytes] = chain.hashes[1:]
            self._prefixes.read([one[:ID_BYTES] for one in stands], stands)
        while self._answers and self._answers[0] <= now:
            heapq.heappop(self._answers)
        self._sequence += 1
        status = RegionStatus(
            region=self.name,
            epoch=str(self._epoch),
            sequence=self._sequence,
            models=self._models,
            prefill_work_s=max(0.0, self._free_at - now),
            decode_work_s=sum(end - max(now, 0.0) for end in self._answers) / SLOTS,
        )
        told, held = self._prefixes.publication(now)
        return status, self._with_filter(told, held)

    def _with_filter(self, told: RegionPrefixes, held: Filter) -> RegionPrefixes:
        if told.base == self._told_base:
            return told
        self._told_base = told.base
        return RegionPrefixes(
            region=told.region,
            epoch=told.epoch,
            version=told.version,
            base=told.base,
            filter=held,
            added=told.added,
            hot=told.hot,
            counts=told.counts,
            total=told.total,
        )

    def _match(self, blocks: Sequence[bytes]) -> int:
        held = 0
        for one in blocks:
            if one not in self._cache:
                break
            held += 1
        return held

    def _keep(self, blocks: Sequence[bytes]) -> None:
        cache = self._cache
        for one in reversed(blocks):
            cache[one] = None
            cache.move_to_end(one)
        while len(cache) > self._blocks:
            cache.popitem(last=False)
