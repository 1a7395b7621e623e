"""The nearest known name to one that is not known, for errors that say what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(given: str, known: Iterable[str], otherwise: str, *, cutoff: float = 0.6) -> str:
    """A question that names the one that is most like `given`, or `otherwise` where none is."""
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else otherwise
