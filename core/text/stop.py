"""Stop strings over a stream of text pieces.

The text ends at the first point where any stop string is complete and is cut where that string
begins; of several that complete at the same character the longest counts. Nothing that may still
become a stop string is let out, and nothing else is held. Where the pieces are cut does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """The part of what was held and of `text` that may go out. Sets `matched`."""
        if not self._stops or self.matched:
            return "" if self.matched else text
        text = self._held + text
        ends = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if ends:
            self.matched, self._held = True, ""
            return text[: min(ends)[1]]
        keep = min(self._candidate(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """What was held and did not become a stop string."""
        text, self._held = self._held, ""
        return text

    def _candidate(self, text: str, stop: str) -> int:
        """Where the longest end of `text` begins that `stop` begins with."""
        at = max(0, len(text) - len(stop) + 1)
        while (at := text.find(stop[0], at)) >= 0:
            if stop.startswith(text[at:]):
                return at
            at += 1
        return len(text)
