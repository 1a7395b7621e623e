"""The page's own files, read once, as answers that browsers keep and check by their ETag."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

STATIC = Path(__file__).parent / "static"
FRONT = "index.html"
# The framework names the charset.
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
GUARDS = {
    # Nothing but this edge's own files runs, and nothing but this edge is spoken to.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
    "vary": "accept, accept-encoding",
}


@dataclass(frozen=True, slots=True)
class File:
    kind: str
    plain: bytes
    packed: bytes
    """gzip."""
    etag: str


@dataclass(frozen=True, slots=True)
class Given:
    """An answer: `kind` is its media type."""

    status: int
    kind: str
    body: bytes
    headers: Mapping[str, str]


def read_files() -> dict[str, File]:
    """By name."""
    return {path.name: _read(path) for path in sorted(STATIC.iterdir()) if path.suffix in TYPES}


def give(file: File, *, encodings: str, known: str) -> Given:
    """`encodings` and `known` are the caller's Accept-Encoding and If-None-Match."""
    headers = {**GUARDS, "etag": file.etag}
    if file.etag in known:
        return Given(304, file.kind, b"", headers)
    if "gzip" in encodings:
        return Given(200, file.kind, file.packed, {**headers, "content-encoding": "gzip"})
    return Given(200, file.kind, file.plain, headers)


def wants_page(accept: str) -> bool:
    """Whether the caller is a browser that goes somewhere; programs get JSON."""
    return "text/html" in accept


def _read(path: Path) -> File:
    plain = path.read_bytes()
    return File(
        kind=TYPES[path.suffix],
        plain=plain,
        packed=gzip.compress(plain, mtime=0),
        etag=f'"{hashlib.sha256(plain).hexdigest()[:32]}"',
    )
