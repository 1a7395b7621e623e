"""Keeps an edge's key book fresh by watching the key file.

Edges that share a state folder share the file, and a revocation reaches them with the next look;
edges elsewhere have a `Follower` that brings another edge's records into their own file.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from core.keys import KeyBook, as_lines, is_marked, mark, parse_lines

_log = logging.getLogger("skerry.keys")

LOOK_S = 1.0
"""Between two looks: with a follower's question a revocation is everywhere within 5 s."""
_Stamp = tuple[int, int, int]
_NO_FILE = (0, 0, 0)


class Keyring:
    """All that the key file ever said to this process. `look` is cheap while the file does not
    change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[_Stamp, bool] | None = None
        self._unread = False
        self._book = KeyBook()
        self.text = b""
        """All that is known, as lines: what followers are sent."""
        self.look()

    def book(self) -> KeyBook:
        return self._book

    def look(self) -> None:
        """Read the file if it is another one than before. What is known only grows: a file that
        lost lines opens no door and revives no key. One that cannot be read keeps doors shut."""
        try:
            marked = is_marked(self._path)  # first: writers mark before they write
            stamp = self._stamp()
            if (stamp, marked) == self._seen:
                return
            text = self._path.read_bytes() if stamp != _NO_FILE else b""
        except OSError as error:
            if not self._unread:
                _log.error("key file unread path=%s why=%s", self._path, error.strerror)
            self._unread, self._seen = True, None
            self._book = KeyBook(self._book.records(), made=True)
            return
        self._learn(text, marked=marked)
        if self._book.made and not marked:
            marked = self._mark()
        self._unread, self._seen = False, (stamp, marked)

    def _stamp(self) -> _Stamp:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return _NO_FILE
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _learn(self, text: bytes, *, marked: bool) -> None:
        records, torn = parse_lines(text)
        known, present = list(self._book.records()), KeyBook(records)
        lost = sum(present.add(record) for record in known)
        self._book = KeyBook([*known, *records], made=marked or torn > 0)
        self.text = as_lines(self._book.records())
        if lost or torn or (marked and not records):
            _log.error(
                "key file is damaged path=%s records lost=%d lines torn=%d;"
                " what was known still holds, and callers need a key",
                self._path, lost, torn,
            )  # fmt: skip
        if self._book.made:
            _log.info("keys read count=%d", len(self._book))

    def _mark(self) -> bool:
        try:
            mark(self._path)
        except OSError as error:
            _log.error("key file not marked path=%s why=%s", self._path, error.strerror)
            return False
        return True

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()
