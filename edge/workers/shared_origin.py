"""Headers of a Worker that answers under `/w/NAME/`, on the origin of the edge and of all other
Workers there: what a browser would hold against the whole origin. Pure."""

from __future__ import annotations

import re

ORIGIN_WIDE = frozenset({
    b"accept-ch", b"alt-svc", b"clear-site-data", b"nel", b"origin-agent-cluster", b"report-to",
    b"service-worker-allowed", b"strict-transport-security",
})  # fmt: skip
"""They act on more than the page that they come with: left out."""
_PATH = re.compile(rb"path\s*=\s*(.*)", re.IGNORECASE | re.DOTALL)
_DOMAIN = re.compile(rb"domain\s*(=|$)", re.IGNORECASE)


def tamed(name: bytes, value: bytes, base: bytes) -> bytes | None:
    """The value that is sent; None for none. `name` in small letters, `base`: `/w/NAME`."""
    if name in ORIGIN_WIDE:
        return None
    return _cookie(value, base) if name == b"set-cookie" else value


def _cookie(value: bytes, base: bytes) -> bytes:
    """Below `base`, where the Worker thinks of its own root, and for this host alone. One that
    names no path is the browser's to place: beside the page that it came with."""
    pair, *attributes = value.split(b";")
    kept = [pair]
    for attribute in attributes:
        text = attribute.strip()
        if _DOMAIN.match(text):
            continue
        if (found := _PATH.match(text)) is not None:
            path = found[1].strip()
            attribute = b" Path=" + base + (path if path.startswith(b"/") else b"/")
        elif text.lower() == b"path":
            attribute = b" Path=" + base + b"/"
        kept.append(attribute)
    return b";".join(kept)
