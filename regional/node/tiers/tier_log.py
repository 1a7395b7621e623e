"""What a pool's tiers hold together, as told to routers: one message a turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from regional.node.cache_log import CacheLog
from regional.pb import node_pb2 as pb

BELOW_MEMORY = 1
"""`CacheEvents.tier` of everything that is neither computed nor in the pool."""


class TierLog:
    """A block is held while at least one shelf has it. `tell` sends to every router."""

    def __init__(self, pool: int, tell: Callable[[pb.NodeMessage], None]) -> None:
        self._log = CacheLog(pool, tier=BELOW_MEMORY)
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._shelves: Counter[bytes] = Counter()
        self._changed: dict[bytes, bool] = {}
        """Digest → was it held when routers were last told."""

    def gained(self, digest: bytes) -> None:
        self._note(digest)
        self._shelves[digest] += 1

    def lost(self, digest: bytes) -> None:
        self._note(digest)
        self._shelves[digest] -= 1
        if not self._shelves[digest]:
            del self._shelves[digest]

    def snapshot(self) -> list[pb.NodeMessage]:
        self._flush()
        return self._log.snapshot()

    def _note(self, digest: bytes) -> None:
        if not self._changed:
            self._loop.call_soon(self._flush)
        self._changed.setdefault(digest, digest in self._shelves)

    def _flush(self) -> None:
        changed, self._changed = self._changed, {}
        stored = [one for one, before in changed.items() if not before and one in self._shelves]
        evicted = [one for one, before in changed.items() if before and one not in self._shelves]
        message = self._log.change(stored, evicted)
        if message is not None:
            self._tell(message)
