"""What the node's prefix cache holds, as told to routers: changes, and a snapshot for a new one."""

from __future__ import annotations

from collections.abc import Sequence

from regional.pb import node_pb2 as pb

_HASHES_A_MESSAGE = 65_536
"""One MiB of hashes: far below any limit on messages."""
_FIRST = 1 << 20
"""Leaves numbers below it for the parts of a snapshot."""


class CacheLog:
    """Mirrors one pool's prefix cache, or a tier below it. `sequence` counts the changes of this
    epoch."""

    def __init__(self, pool: int = 0, tier: int = 0) -> None:
        self._pool = pool
        self._tier = tier
        self._held: dict[bytes, None] = {}
        self._sequence = _FIRST

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    def change(self, stored: Sequence[bytes], evicted: Sequence[bytes]) -> pb.NodeMessage | None:
        """Take one step's changes in, evictions first, as the rank reports them."""
        if not stored and not evicted:
            return None
        for digest in evicted:
            self._held.pop(digest, None)
        self._held.update(dict.fromkeys(stored))
        self._sequence += 1
        return self._message(stored, evicted, snapshot=False)

    def snapshot(self) -> list[pb.NodeMessage]:
        """Everything held, for a router that has just been joined. The last part has the number of
        the last change: other routers hear nothing of it, so it must not take numbers of its
        own."""
        held = list(self._held)
        starts = range(0, max(1, len(held)), _HASHES_A_MESSAGE)
        return [
            self._message(
                held[start : start + _HASHES_A_MESSAGE],
                (),
                snapshot=start == 0,
                earlier=len(starts) - 1 - part,
            )
            for part, start in enumerate(starts)
        ]

    def _message(
        self,
        stored: Sequence[bytes],
        evicted: Sequence[bytes],
        *,
        snapshot: bool,
        earlier: int = 0,
    ) -> pb.NodeMessage:
        return pb.NodeMessage(
            cache_events=pb.CacheEvents(
                pool=self._pool,
                tier=self._tier,
                sequence=self._sequence - earlier,
                snapshot=snapshot,
                stored=b"".join(stored),
                evicted=b"".join(evicted),
            )
        )
