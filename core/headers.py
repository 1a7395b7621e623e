"""Names of the headers that our own processes say to each other."""

from __future__ import annotations

SECRET_HEADER = "x-skerry-secret"
"""The region's secret, or an operator's of the whole world."""
WIRE_HEADER = "x-skerry-wire"
"""`core.types.WIRE_VERSION` of whoever asks."""
