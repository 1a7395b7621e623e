"""The key-value store of Workers: one SQLite file of the state folder, shared by its edges.

Read and written where it is called: a read takes some microseconds, a write waits for no disk. A
power cut may lose the last second of writes; it loses no file. Values expire to the second.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BUSY_S = 5.0
"""How long a write waits for one of another edge."""
_TABLES = """
CREATE TABLE IF NOT EXISTS pairs (
    tenant TEXT NOT NULL, space TEXT NOT NULL, key TEXT NOT NULL,
    value BLOB NOT NULL, metadata TEXT, expires INTEGER,
    PRIMARY KEY (tenant, space, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS ends ON pairs (expires) WHERE expires IS NOT NULL;
"""


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace; two tenants never share one."""

    tenant: str
    id: str


@dataclass(frozen=True, slots=True)
class Pair:
    """`metadata` is JSON, `expires` in Unix seconds."""

    key: str
    value: bytes
    metadata: str | None
    expires: int | None


@dataclass(frozen=True, slots=True)
class Page:
    """Keys in the order of their UTF-8 bytes; `after` is where the next page goes on. The pairs
    have no values."""

    pairs: tuple[Pair, ...]
    after: str | None


class KvStore:
    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Raises sqlite3.Error."""
        self._clock = clock
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(_TABLES)

    def close(self) -> None:
        self._db.close()

    def get(self, space: Space, key: str) -> Pair | None:
        row = self._db.execute(
            "SELECT key, value, metadata, expires FROM pairs WHERE tenant = ? AND space = ?"
            " AND key = ? AND (expires IS NULL OR expires > ?)",
            (space.tenant, space.id, key, self._clock()),
        ).fetchone()
        return None if row is None else Pair(*row)

    def put(self, space: Space, pair: Pair) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO pairs VALUES (?, ?, ?, ?, ?, ?)",
            (space.tenant, space.id, pair.key, pair.value, pair.metadata, pair.expires),
        )

    def delete(self, space: Space, key: str) -> None:
        self._db.execute(
            "DELETE FROM pairs WHERE tenant = ? AND space = ? AND key = ?",
            (space.tenant, space.id, key),
        )

    def page(self, space: Space, *, prefix: str = "", after: str = "", limit: int = 1000) -> Page:
        rows = self._db.execute(
            "SELECT key, x'', metadata, expires FROM pairs WHERE tenant = ? AND space = ?"
            " AND key > ? AND key >= ? AND substr(key, 1, ?) = ?"
            " AND (expires IS NULL OR expires > ?) ORDER BY key LIMIT ?",
            (space.tenant, space.id, after, prefix, len(prefix), prefix, self._clock(), limit + 1),
        ).fetchall()
        pairs = tuple(Pair(*row) for row in rows[:limit])
        return Page(pairs, pairs[-1].key if len(rows) > limit else None)

    def sweep(self) -> int:
        """Forget what has expired. Returns how many pairs it was."""
        ended = self._db.execute("DELETE FROM pairs WHERE expires <= ?", (self._clock(),))
        return ended.rowcount
