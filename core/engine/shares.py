"""What one step of a pipeline takes, so that the steps beside it have as much to do.

Every stage is to have a step of its own, of other sequences: a sequence's next token can only be
computed once its last one has come out at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.engine.intake import Limits
from core.engine.sequence import Sequence as Generation
from core.types import BLOCK_TOKENS

_LEAST_CHUNK = 4 * BLOCK_TOKENS
"""Prompts are not cut smaller for the sake of a pipeline."""


def decoding(running: Sequence[Generation], stages: int) -> list[Generation]:
    """Whose next row is one token. In a pipeline it is a share of them, and none whose token is
    still on its way, or whose guesses are."""
    if stages == 1:
        return [one for one in running if one.remaining == 1]
    free = [one for one in running if one.remaining == 1 and not one.pending]
    return free[: -(-(len(free) + under_way(running)) // stages)]


def under_way(running: Iterable[Generation]) -> int:
    """Of a pipeline: whose token, or whose guesses, are in one of the steps in flight."""
    return sum(1 for one in running if one.pending and one.remaining <= 1)


def prompt_share(everyone: Iterable[Generation], limits: Limits) -> int:
    """The most prompt tokens of a step: in a pipeline so many that all stages have some."""
    if limits.stages == 1:
        return limits.max_step_tokens
    reading = sum(one.goal - one.computed for one in everyone if one.goal - one.computed > 1)
    share = -(-reading // limits.stages // BLOCK_TOKENS) * BLOCK_TOKENS
    return min(limits.max_step_tokens, max(_LEAST_CHUNK, share))
