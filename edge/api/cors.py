"""Which web pages may call an edge from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from litestar.config.cors import CORSConfig

from edge.tenants.meter import Kind

_SHOWN = [
    *("x-request-id", "x-skerry-region", "x-skerry-route", "server-timing", "retry-after"),
    *(f"x-ratelimit-{what}-{kind}" for kind in Kind for what in ("limit", "remaining", "reset")),
]
"""Headers of answers that a page's script may read."""
_DAY_S = 86400


def cors(origins: Sequence[str]) -> CORSConfig | None:
    """None where no page may. Cookies are never part of it: keys travel in a header."""
    if not origins:
        return None
    return CORSConfig(
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=_SHOWN,
        max_age=_DAY_S,
    )
