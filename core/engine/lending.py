"""Blocks that somebody outside the rank fills or reads, without a sequence that is computed.

An *import* brings a run of a prompt's blocks into the prefix cache: what is lacking is set aside,
filled from outside and adopted, or freed. A *hold* keeps cached blocks where they are while they
are sent away. Neither takes anything from anybody.
"""

from __future__ import annotations

from collections.abc import Callable

from core.engine.lending_messages import Held
from core.engine.messages import (
    Reserved,
    SequenceSpec,
)
from core.engine.roster import Roster
from core.engine.sequence import Sequence, Status
from core.errors import InternalError, NoCapacity, RequestError
from core.kv.block_manager import BlockManager, blocks_for
from core.kv.prefix_cache import CachedBlock
from core.types import BLOCK_TOKENS


def whole_blocks(token_ids: tuple[int, ...], namespace: str, *, priority: int = 0) -> SequenceSpec:
    """What stands for blocks that no answer belongs to."""
    if len(token_ids) % BLOCK_TOKENS:
        raise InternalError(f"{len(token_ids)} tokens are not whole blocks")
    return SequenceSpec(token_ids=token_ids, namespace=namespace, max_tokens=1, priority=priority)


class Lending:
    """`spare`: blocks that whoever is let in leaves for the growth of others."""

    def __init__(self, roster: Roster, blocks: BlockManager, spare: Callable[[], int]) -> None:
        self._roster = roster
        self._blocks = blocks
        self._spare = spare

    def set_aside(self, sequence: Sequence, tokens: int) -> Reserved | RequestError:
        """Blocks for the first `tokens` of a newcomer, which is reserved then; those that wait
        before it keep their claim."""
        start, count = self._start(sequence, tokens), blocks_for(tokens)
        claimed = sum(
            blocks_for(other.goal) - len(other.table)
            for other in self._roster.waiting
            if other.key < sequence.key
        )
        if not self._blocks.fits(start, count, spare=self._spare() + claimed):
            return NoCapacity(
                f"{count} blocks of KV are wanted; {self._blocks.available} of "
                f"{self._blocks.total} are free and {claimed} of those are spoken for"
            )
        self._blocks.adopt(sequence.table, start)
        self._blocks.grow(sequence.table, count - len(start))
        sequence.computed = sequence.planned = len(start) * BLOCK_TOKENS
        if not self._blocks.reserve_windows(sequence.table, tokens):
            self._blocks.free(sequence.table)
            return NoCapacity("the blocks of a KV window are all in use")
        self._roster.reserve(sequence)
        return Reserved(
            sequence=sequence.id,
            cached_tokens=sequence.computed,
            fill=self._roster.set_aside(sequence.id),
        )

    def adopt(self, sequence: Sequence, tokens: int) -> None:
        """The first `tokens` of an import are in place: they are cached from now on, the rest is
        free. A start without its end is of no use where a window forgets: what its last token
        sees was not asked for."""
        if sequence.status is not Status.RESERVED:
            raise InternalError(f"adopt of {sequence.id}, which is {sequence.status.value}")
        whole = tokens == len(sequence.tokens)
        # One that has died meanwhile was in doubt, and with it what hangs on it.
        certain = all(entry.alive for entry in sequence.table.chain)
        if certain and (whole or not self._blocks.forgets):
            self._blocks.register(sequence.table, sequence.chain, tokens)
        self._roster.leave(sequence)

    def hold(self, sequence: Sequence) -> Held:
        """What the cache has of a newcomer, kept until it leaves."""
        start = self._start(sequence, len(sequence.tokens))
        tokens = sequence.computed = sequence.planned = len(start) * BLOCK_TOKENS
        self._blocks.adopt(sequence.table, start)
        self._roster.keep(sequence)
        return Held(sequence=sequence.id, tokens=tokens, blocks=sequence.table.view(tokens))

    def _start(self, sequence: Sequence, tokens: int) -> list[CachedBlock]:
        found = self._blocks.cache.find(sequence.chain, tokens // BLOCK_TOKENS)
        return self._blocks.usable(found)
