"""What the node's prefix cache holds, as told to routers: changes, and a snapshot for a new one."""

from __future__ import annotations

from collections.abc import Sequence

from regional.pb import node_pb2 as pb

_HASHES_A_MESSAGE = 65_536
"""One MiB of hashes: far below any limit on messages."""


class CacheLog:
    """Mirrors one pool's prefix cache. `sequence` counts the changes of this epoch."""

    def __init__(self, pool: int = 0) -> None:
        self._pool = pool
        self._held: dict[bytes, None] = {}
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._held)

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
        """Everything held, for a router that has just been joined. Each message counts."""
        held = list(self._held)
        messages: list[pb.NodeMessage] = []
        for start in range(0, max(1, len(held)), _HASHES_A_MESSAGE):
            if start:
                self._sequence += 1
            part = held[start : start + _HASHES_A_MESSAGE]
            messages.append(self._message(part, (), snapshot=start == 0))
        return messages

    def _message(
        self, stored: Sequence[bytes], evicted: Sequence[bytes], *, snapshot: bool
    ) -> pb.NodeMessage:
        return pb.NodeMessage(
            cache_events=pb.CacheEvents(
                pool=self._pool,
                sequence=self._sequence,
                snapshot=snapshot,
                stored=b"".join(stored),
                evicted=b"".join(evicted),
            )
        )
