"""What a step costs, learned from the steps themselves: seconds by what is in it.

A step of D decode tokens (drafts included) and P prompt tokens is taken to cost
decode(D) + P ÷ prefill rate. decode() is a table, because it is anything but linear: kernels change
at some size of batch. A mixed step's time is shared out in the proportions known so far, which
comes to the true rates as mixed and plain steps go by.
"""

from __future__ import annotations

from core.engine.plan import StepPlan
from core.types import BLOCK_TOKENS

_PREFILL_MEMORY_TOKENS = 4096
_DECODE_MEMORY_STEPS = 16
_FINE = 16
"""Sizes up to here are told apart, above it eight by eight."""
SHORTEST_STEP_S = 1e-6
"""Of a step that took no time by its clock: no rate is divided by zero."""
_SPIKE = 2.0
"""A step that took so many times what was expected says more about the machine than about steps."""


class StepCost:
    """Seeded with what was measured at load: one long prompt, and one token at a time."""

    def __init__(self, prefill_tokens_per_s: float, decode_tokens_per_s: float) -> None:
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self._first = 1 / decode_tokens_per_s
        self._table: dict[int, tuple[float, int]] = {}  # size → (seconds, steps seen)

    def decode_s(self, tokens: int) -> float:
        """A step of `tokens` tokens that belong to answers.

        A size that was never seen is taken to cost what the next smaller one does, and for each
        token more as much as in a prompt. That is cheap, so such a size is tried, and then known.
        """
        if tokens <= 0:
            return 0.0
        size = _size(tokens)
        known = self._table.get(size)
        if known is not None:
            return known[0]
        below = max((one for one in self._table if one < size), default=0)
        if below:
            return self._table[below][0] + (size - below) / self.prefill_tokens_per_s
        above = min(self._table, default=0)
        whole = self._first + (size - 1) / self.prefill_tokens_per_s
        return min(whole, self._table[above][0]) if above else whole

    def step_s(self, decode_tokens: int, prompt_tokens: int) -> float:
        return self.decode_s(decode_tokens) + prompt_tokens / self.prefill_tokens_per_s

    def prompt_tokens_within(self, seconds: float, decode_tokens: int) -> int:
        """Prompt tokens that fit a step of `seconds` beside `decode_tokens`, in whole blocks.

        At least what takes as long as those decodes, and a block: or a prompt would hardly be read
        where many decode.
        """
        decoding = self.decode_s(decode_tokens)
        left = max(seconds - decoding, decoding)
        blocks = int(left * self.prefill_tokens_per_s) // BLOCK_TOKENS
        return max(1, blocks) * BLOCK_TOKENS

    def note(self, plan: StepPlan, seconds: float) -> None:
        """A step was computed. Rests of a prompt below a block say nothing about the rate."""
        seconds = max(seconds, SHORTEST_STEP_S)
        decode = sum(len(row.token_ids) for row in plan.rows if row.decodes)
        prompt = plan.tokens - decode
        if not prompt:
            self._note_decode(decode, seconds)
        elif prompt >= BLOCK_TOKENS:
            reading = prompt / self.prefill_tokens_per_s
            reading *= seconds / (reading + self.decode_s(decode))
            share = min(1.0, prompt / _PREFILL_MEMORY_TOKENS)
            rate = prompt / reading
            self.prefill_tokens_per_s += share * (rate - self.prefill_tokens_per_s)

    def _note_decode(self, tokens: int, seconds: float) -> None:
        if not tokens:
            return
        size = _size(tokens)
        before, steps = self._table.get(size, (seconds, 0))
        steps = min(steps + 1, _DECODE_MEMORY_STEPS)
        if steps > 1:
            seconds = min(seconds, _SPIKE * before)
        self._table[size] = (before + (seconds - before) / steps, steps)


def _size(tokens: int) -> int:
    return tokens if tokens <= _FINE else -(-tokens // 8) * 8
