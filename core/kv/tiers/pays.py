"""Is it quicker to load blocks than to compute them? By rates that were measured. Pure."""

from __future__ import annotations

from core.types import BLOCK_TOKENS

FIRST_GUESS_BYTES_PER_S = 500e6
"""Of a tier that nothing was loaded from yet."""
OVERHEAD_S = 0.003
"""Setting blocks aside and taking them over: two messages each way."""
_WEIGHT = 0.3
_FORGIVEN = 1.05


class LoadRate:
    """Moving average of what loads gave. A tier that was too slow is tried again after a while:
    each time that it is left alone it is thought a little faster."""

    def __init__(self) -> None:
        self.bytes_per_s = FIRST_GUESS_BYTES_PER_S

    def note(self, size: int, seconds: float) -> None:
        rate = size / max(seconds, 1e-6)
        self.bytes_per_s += _WEIGHT * (rate - self.bytes_per_s)

    def left_alone(self) -> None:
        self.bytes_per_s = min(FIRST_GUESS_BYTES_PER_S, self.bytes_per_s * _FORGIVEN)


def pays(blocks: int, size: int, bytes_per_s: float, prefill_tokens_per_s: float) -> bool:
    """`size`: bytes of all `blocks`. A rate of 0 is one that nobody has measured."""
    if not blocks:
        return False
    if prefill_tokens_per_s <= 0:
        return True
    return OVERHEAD_S + size / bytes_per_s < blocks * BLOCK_TOKENS / prefill_tokens_per_s
