"""A step while it is put together: rows for the runner, and what each of them will have done."""

from __future__ import annotations

from dataclasses import dataclass

from core.engine.plan import Row, RowResult
from core.engine.sequence import Sequence
from core.types import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Part:
    """A row in flight: `end` positions are in place once it is done."""

    sequence: Sequence
    end: int
    samples: bool

    def error(self, row: RowResult | None, *, vocab_size: int) -> str | None:
        """Why `row` is no usable result, if so."""
        if row is None:
            return "the step gave no result for this sequence"
        if row.error is not None:
            return row.error
        if self.samples and row.token_id is None:
            return "the step gave no token for this sequence"
        if self.samples and not 0 <= (row.token_id or 0) < vocab_size:
            return f"the step gave token {row.token_id}, which is outside the vocabulary"
        return None


class Draft:
    """`budget`: tokens that still fit."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[Row] = []
        self.parts: list[Part] = []

    def add(self, sequence: Sequence) -> None:
        """Plan the sequence's next positions, as far as budget and blocks go."""
        start = sequence.planned
        end = min(sequence.goal, start + self.budget, sequence.table.capacity)
        if end < sequence.goal and end - end % BLOCK_TOKENS > start:
            end -= end % BLOCK_TOKENS  # whole blocks can be sent and shared at once
        if end <= start:
            return
        samples = not sequence.prefill_only and end == len(sequence.tokens)
        self.rows.append(
            Row(
                sequence=sequence.id,
                token_ids=tuple(sequence.tokens[start:end]),
                start=start,
                block_tables=sequence.table.view(end),
                sample=sequence.sample() if samples else None,
            )
        )
        self.parts.append(Part(sequence, end, samples))
        self.budget -= end - start
        sequence.planned = end
        sequence.in_flight += 1
