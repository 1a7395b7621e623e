"""What is asked of each model, as far as the number of its nodes hangs on it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from core.types import ModelName, Timings

LATELY_S = 30.0
"""First tokens older than this say nothing of now."""
MOST_FIRSTS = 256
MOST_MODELS = 256
"""A request may name a model that the region does not have."""


class Demand:
    """`clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._active: Counter[ModelName] = Counter()
        self._last: dict[ModelName, float] = {}
        self._firsts: dict[ModelName, deque[tuple[float, float]]] = {}

    def came(self, model: ModelName) -> None:
        self._active[model] += 1

    def went(self, model: ModelName) -> None:
        self._active[model] -= 1
        if self._active[model] <= 0:
            del self._active[model]
        if model in self._last or len(self._last) < MOST_MODELS:
            self._last[model] = self._clock()

    def answered(self, model: ModelName, timings: Timings) -> None:
        firsts = self._firsts.setdefault(model, deque(maxlen=MOST_FIRSTS))
        firsts.append((self._clock(), timings.queue_s + timings.prefill_s))

    def idle_s(self, model: ModelName) -> float:
        """Since its last request came or ended, at most since the start; 0 while there is one."""
        if model in self._active:
            return 0.0
        return self._clock() - self._last.get(model, self._began)

    def first_token_s(self, model: ModelName) -> float:
        """The mean from arrival to first token of what was answered lately; 0 where nothing was."""
        firsts = self._firsts.get(model, deque())
        while firsts and firsts[0][0] < self._clock() - LATELY_S:
            firsts.popleft()
        return sum(seconds for _, seconds in firsts) / len(firsts) if firsts else 0.0
