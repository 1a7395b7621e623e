"""What became of the prompts of answered requests: the region's three hit rates.

*reusable*: held by some pool when the request was placed. *routed*: held by the pool that was to
read it. *delivered*: not computed by anybody in the end, as the nodes report. A cache that loses
blocks shows between the last two, a request in the wrong place between the first two, and events
that stay away where more is delivered than was known to be there.
"""

from __future__ import annotations

from core.events import Done
from core.metrics import RouterMetrics
from core.status import PromptTokens
from regional.dispatch import Placed


class Hits:
    """Prompt tokens since the router's start: `told`, and the same as metrics."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self.told = PromptTokens()
        self._counters = metrics.prompt_tokens

    def answered(self, placed: Placed, done: Done) -> None:
        """Once for each answered request, with the place where its prompt was read."""
        placement, usage = placed.placement, done.usage
        more = {
            "all": usage.prompt_tokens,
            "reusable": placed.reusable_tokens,
            "routed": placement.cached_tokens,
            "pulled": placement.pull.tokens if placement.pull else 0,
            "delivered": usage.cached_tokens,
        }
        for kind, tokens in more.items():
            self._counters.labels(kind).inc(tokens)
        self.told = PromptTokens(
            **{kind: getattr(self.told, kind) + tokens for kind, tokens in more.items()}
        )
