"""A step while it is put together: rows for the runner, and what each of them will have done."""

from __future__ import annotations

from dataclasses import dataclass

from core.engine.plan import Row, RowResult
from core.engine.sequence import Sequence
from core.kv.block_manager import BlockManager
from core.types import BLOCK_TOKENS

_PLACEHOLDER = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A row in flight: `end` positions are in place once it is done, and one more for each of its
    `drafts` that is right."""

    sequence: Sequence
    end: int
    samples: bool
    drafts: int = 0

    def error(self, row: RowResult | None, *, vocab_size: int) -> str | None:
        """Why `row` is no usable result, if so."""
        if row is None:
            return "the step gave no result for this sequence"
        if row.error is not None:
            return row.error
        if self.samples and not row.token_ids:
            return "the step gave no token for this sequence"
        if len(row.token_ids) > self.samples + self.drafts:
            return f"the step gave {len(row.token_ids)} tokens, too many for this sequence"
        for token in row.token_ids:
            if not 0 <= token < vocab_size:
                return f"the step gave token {token}, which is outside the vocabulary"
        return None


class Draft:
    """`budget`: tokens that still fit. `chunk`: the most of these that prompts may have."""

    def __init__(self, blocks: BlockManager, budget: int) -> None:
        self.budget = budget
        self.chunk = budget
        self.rows: list[Row] = []
        self.parts: list[Part] = []
        self._blocks = blocks

    @property
    def decode_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows if row.decodes)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows if not row.decodes)

    def add(self, sequence: Sequence, guesses: tuple[int, ...] = ()) -> None:
        """Plan the sequence's next positions, as far as budget and blocks go; `guesses` after them
        when those are all."""
        start = sequence.planned
        wanted = sequence.goal - start
        budget = self.budget if wanted == 1 else min(self.budget, self.chunk)
        end = self._blocks.reach(sequence.table, min(sequence.goal, start + budget))
        if end < sequence.goal and end - end % BLOCK_TOKENS > start:
            end -= end % BLOCK_TOKENS  # whole blocks can be sent and shared at once
        if end <= start:
            return
        known = len(sequence.tokens)
        samples = not sequence.prefill_only and end == known + sequence.pending
        guesses = guesses[: self.budget - (end - start)] if samples else ()
        last = self._blocks.reach(sequence.table, end + len(guesses))
        guesses = guesses[: last - end]
        follows = start >= known
        given = (_PLACEHOLDER,) if follows else tuple(sequence.tokens[start:end])
        self.rows.append(
            Row(
                sequence=sequence.id,
                token_ids=given + guesses,
                start=start,
                block_tables=sequence.table.view(last),
                sample=sequence.sample() if samples else None,
                drafts=len(guesses),
                follows=follows,
            )
        )
        self.parts.append(Part(sequence, end, samples, len(guesses)))
        self.budget -= last - start
        if wanted > 1:
            self.chunk -= end - start
        sequence.planned = last
        sequence.in_flight += 1
        sequence.pending += samples
