"""What answers teach an edge that has no tokenizer: how many bytes of prompt make a token, and what
a model's chat template adds."""

from __future__ import annotations

from core.types import ModelName
from edge.routing.placement import BYTES_PER_TOKEN

LEAST, MOST = 1.0, 8.0
"""What tokenizers do; anything else is a mistake in somebody's usage counts."""
WEIGHT = 0.05
"""Of a new answer in the moving mean: some twenty answers make a figure."""


class BytesPerToken:
    """A moving mean for each model; models are few."""

    def __init__(self) -> None:
        self._of: dict[ModelName, float] = {}

    def of(self, model: ModelName) -> float:
        return self._of.get(model, BYTES_PER_TOKEN)

    def learn(self, model: ModelName, text_bytes: int, prompt_tokens: int) -> None:
        if not text_bytes or not prompt_tokens:
            return
        seen = min(max(text_bytes / prompt_tokens, LEAST), MOST)
        self._of[model] = self.of(model) * (1 - WEIGHT) + seen * WEIGHT


SHORT_BYTES = 400
"""Of text, so little that what else a prompt has is the template's."""
MOST_ADDED = 512


class TemplateTokens:
    """The most that a model's template was seen to put around the text of a short chat: a system
    prompt of its own, for one."""

    def __init__(self) -> None:
        self._of: dict[ModelName, int] = {}

    def of(self, model: ModelName) -> int:
        return self._of.get(model, 0)

    def learn(self, model: ModelName, text_bytes: int, estimate: int, prompt_tokens: int) -> None:
        """`estimate`: what the prompt was taken for, the template's own text left out."""
        if text_bytes <= SHORT_BYTES:
            added = min(prompt_tokens - estimate, MOST_ADDED)
            self._of[model] = max(added, self.of(model))
