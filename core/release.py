"""Which release this is."""

from __future__ import annotations

import importlib.metadata


def release() -> str:
    """The installed version; "source" for a folder of sources that is not installed."""
    try:
        return importlib.metadata.version("skerry")
    except importlib.metadata.PackageNotFoundError:
        return "source"
