"""Keeps an edge's key book fresh by watching the key file.

Edges that share a state folder share the file, and a revocation reaches them with the next look;
edges elsewhere have a `Follower` that brings another edge's records into their own file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from core.keys import (
    KeyBook,
    KeyRecord,
    Revoked,
    as_lines,
    mark,
    mark_of,
    marked_by,
    parse_lines,
)

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
        self._seen: tuple[_Stamp, _Stamp] | None = None
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
            seen = self._stamps()
            if seen == self._seen:
                return
            marked = marked_by(self._path)
            text = self._path.read_bytes() if self._path.exists() else b""
        except OSError as error:
            if not self._unread:
                _log.error("key file unread path=%s why=%s", self._path, error.strerror)
            self._unread, self._seen = True, None
            self._book = KeyBook(self._book.records(), made=True)
            return
        self._learn(text, marked)
        if self._book.made:
            self._mark(marked)
            seen = _stamp(mark_of(self._path)), seen[1]  # what it has now, the book has too
        self._unread, self._seen = False, seen

    def _stamps(self) -> tuple[_Stamp, _Stamp]:
        """The mark's is taken first, as it is read first."""
        return _stamp(mark_of(self._path)), _stamp(self._path)

    def _learn(self, text: bytes, marked: Sequence[KeyRecord] | None) -> None:
        records, torn = parse_lines(text)
        known, present = [*self._book.records(), *(marked or ())], KeyBook(records)
        lost = sum(present.add(record) for record in known)
        made = marked is not None or torn > 0
        self._book = KeyBook([*known, *records], made=made)
        self.text = as_lines(self._book.records())
        if lost or torn or (marked is not None and not records):
            _log.error(
                "key file is damaged path=%s records lost=%d lines torn=%d;"
                " what was known still holds, and callers need a key",
                self._path, lost, torn,
            )  # fmt: skip
        if self._book.made:
            _log.info("keys read count=%d", len(self._book))

    def _mark(self, marked: Sequence[KeyRecord] | None) -> None:
        revoked = {one.id: one for one in self._book.records() if isinstance(one, Revoked)}
        for record in marked or ():
            revoked.pop(record.id, None)
        if marked is not None and not revoked:
            return
        try:
            mark(self._path, revoked.values())
        except OSError as error:
            _log.error("key file not marked path=%s why=%s", self._path, error.strerror)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except FileNotFoundError:
        return _NO_FILE
    return found.st_ino, found.st_size, found.st_mtime_ns
