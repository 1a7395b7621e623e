"""What every runner does with rows that build on tokens of another step, or on guesses.

A plan may be made before the step before it has sampled: such a row begins with a placeholder.
Steps are computed in order, so the runner knows the token by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from core.engine.plan import Row, RowResult, SequenceId

_Token = TypeVar("_Token", int, int | None)


MOST_AHEAD = 8
"""Plans that may be made before the first of them has a result."""


class Pending:
    """The last token that each sequence of the newest steps got. One for each runner."""

    def __init__(self) -> None:
        self._steps: deque[dict[SequenceId, int | None]] = deque(maxlen=MOST_AHEAD)

    def resolve(self, rows: Sequence[Row]) -> tuple[list[Row], list[RowResult]]:
        """Rows with their placeholders filled in, and errors for those that follow nothing."""
        whole: list[Row] = []
        broken: list[RowResult] = []
        for row in rows:
            if not row.follows:
                whole.append(row)
                continue
            token = self.newest(row.sequence)
            if token is None:
                broken.append(RowResult(row.sequence, error="the step before gave no token"))
            else:
                sample = row.sample.knowing((token,)) if row.sample is not None else None
                token_ids = (token, *row.token_ids[1:])
                whole.append(replace(row, token_ids=token_ids, sample=sample))
        return whole, broken

    def newest(self, sequence: SequenceId) -> int | None:
        """The last token of a sequence. Not always of the very last step: it may have had no room
        in that one."""
        return next((step[sequence] for step in self._steps if sequence in step), None)

    def note(self, results: Sequence[RowResult]) -> None:
        """A step has been computed."""
        self._steps.appendleft(
            {one.sequence: one.token_ids[-1] if one.token_ids else None for one in results}
        )


def accepted(row: Row, drawn: Sequence[_Token]) -> tuple[_Token, ...]:
    """Of the tokens drawn for `row` (one for each of its `specs`): those that count.

    What was drawn after a wrong guess was drawn from another text than the real one.
    """
    first = len(row.token_ids) - row.drafts
    right = 0
    while right < row.drafts and drawn[right] == row.token_ids[first + right]:
        right += 1
    return tuple(drawn[: right + 1])
