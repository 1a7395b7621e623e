"""Keeps an edge's key book fresh by watching the key file.

Edges that share a state folder share the file, and a revocation reaches them with the next look;
edges elsewhere have a `Follower` that brings another edge's records into their own file.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from core.keys import KeyBook, parse_lines

_log = logging.getLogger("skerry.keys")

LOOK_S = 1.0
"""Between two looks: with a follower's question a revocation is everywhere within 5 s."""


class Keyring:
    """The key file's present content. `look` is cheap while the file does not change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._book = KeyBook()
        self.text = b""
        """The file as it was read last: what followers are sent."""
        self.look()

    def book(self) -> KeyBook:
        return self._book

    def look(self) -> None:
        """Read the file if it is another one than before. A missing file changes nothing once
        keys are known: a book that was lost must not open doors."""
        try:
            found = self._path.stat()
            mark = (found.st_ino, found.st_size, found.st_mtime_ns)
            if mark == self._seen:
                return
            text = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            _log.error("key file unread path=%s why=%s", self._path, error.strerror)
            return
        records, torn = parse_lines(text)
        if torn:
            _log.warning("key file has torn lines path=%s lines=%d", self._path, torn)
        self._seen, self._book, self.text = mark, KeyBook(records), text
        _log.info("keys read count=%d", len(self._book))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()
