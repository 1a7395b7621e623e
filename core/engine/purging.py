"""Taking a namespace's KV out of a rank: out of the prefix cache at once, out of memory as soon as
nothing that is under way has its blocks, and out of use until the front has overwritten them."""

from __future__ import annotations

from core.engine.purge_messages import Purged
from core.kv.block_manager import BlockManager
from core.prefix import block_root


class Purging:
    def __init__(self, blocks: BlockManager, fingerprint: bytes) -> None:
        self._blocks = blocks
        self._fingerprint = fingerprint
        self._open: dict[str, int] = {}
        """Namespace → cached blocks that it had."""

    def begin(self, namespace: str) -> None:
        """Whatever of it runs should have been aborted before: this waits for it."""
        cached = self._blocks.condemn(self._root(namespace))
        self._open[namespace] = self._open.get(namespace, 0) + cached

    def settled(self) -> list[Purged]:
        """Those of which nothing is under way any more, each once."""
        over = [one for one in self._open if not self._out(one)]
        return [
            Purged(
                namespace=namespace,
                cached_blocks=self._open.pop(namespace),
                blocks=self.blocks(namespace),
            )
            for namespace in over
        ]

    def blocks(self, namespace: str) -> tuple[tuple[int, ...], ...]:
        """Of each KV group, those that the front overwrites."""
        root = self._root(namespace)
        return tuple(free.waiting(root) for free in self._blocks.free_blocks)

    def scrubbed(self, namespace: str) -> None:
        root = self._root(namespace)
        for free in self._blocks.free_blocks:
            free.scrubbed(root)

    def _out(self, namespace: str) -> int:
        """Condemned blocks that somebody still holds."""
        root = self._root(namespace)
        return sum(free.out(root) for free in self._blocks.free_blocks)

    def _root(self, namespace: str) -> bytes:
        return block_root(self._fingerprint, namespace)
