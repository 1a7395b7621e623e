"""The queue on disk: SQLite, one connection, used by one thread.

What a request said is deleted with its row's answer, and deleted bytes are overwritten. Times are
Unix seconds: they must mean the same after a restart.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.batches import KEEP_S, BatchState, ItemAnswer, Submission
from core.errors import ConfigError, DeadlineExceeded, InvalidRequest, NoCapacity, to_fault
from core.events import Event, encode_frame
from core.types import GenerateRequest, ModelName
from regional.queue.rules import Again, Answered, ItemState, after_restart

MAX_ITEMS = 10_000
"""Requests that may be queued in one region."""
MAX_BYTES = 512 << 20
"""Of requests and answers together."""
FULL_RETRY_S = 60.0
_PAGE = 4096
_decode = msgspec.msgpack.Decoder(GenerateRequest).decode
_PRAGMAS = (
    "journal_mode = TRUNCATE",
    "synchronous = FULL",
    "secure_delete = ON",
    "foreign_keys = ON",
    f"max_page_count = {2 * MAX_BYTES // _PAGE}",
)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, namespace TEXT NOT NULL, model TEXT NOT NULL,
    created REAL NOT NULL, open INTEGER NOT NULL, done REAL, told INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE IF NOT EXISTS items (
    batch TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE, number INTEGER NOT NULL,
    state TEXT NOT NULL, tries INTEGER NOT NULL DEFAULT 0, not_before REAL NOT NULL DEFAULT 0,
    request_id TEXT NOT NULL, note BLOB NOT NULL, request BLOB, events BLOB,
    PRIMARY KEY (batch, number)
) STRICT;
CREATE INDEX IF NOT EXISTS queued ON items (not_before) WHERE state = 'queued';
"""


@dataclass(frozen=True, slots=True)
class Job:
    """An item that is to run now."""

    batch: str
    number: int
    tries: int
    request: GenerateRequest


class Store:
    """`path` None keeps it in memory. Raises ConfigError where the file cannot be used."""

    def __init__(self, path: Path | None) -> None:
        self._turn = 0
        self._turns: dict[str, int] = {}
        try:
            if path is not None:
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(
                path or ":memory:", isolation_level=None, check_same_thread=False
            )
            for pragma in _PRAGMAS:
                self._db.execute(f"PRAGMA {pragma}")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path}: the queue cannot be kept there: {error}") from error

    def close(self) -> None:
        self._db.close()

    def recover(self, now: float) -> None:
        """After a start: what ran then is queued again, or answered with a failure."""
        rows = self._db.execute("SELECT batch, number, tries FROM items WHERE state = 'running'")
        with self._writing():
            for batch, number, tries in rows.fetchall():
                match after_restart(tries):
                    case Answered(events):
                        self._answer(batch, number, events, now)
                    case Again(tries, pause_s):
                        self._queue(batch, number, tries, now + pause_s)

    def add(self, batch: Submission, now: float) -> BatchState:
        """Raises NoCapacity. A batch that is here already stays as it is."""
        known = self.state(batch.id, batch.namespace)
        if known is not None:
            return known
        (items,) = self._db.execute(
            "SELECT count(*) FROM items WHERE request IS NOT NULL"
        ).fetchone()
        rows = [
            (batch.id, i, one.request.id, one.note, msgspec.msgpack.encode(one.request))
            for i, one in enumerate(batch.items)
        ]
        size = sum(len(row[-1]) for row in rows)
        if items + len(rows) > MAX_ITEMS or self.size() + size > MAX_BYTES:
            raise NoCapacity(
                f"the queue of this region is full ({items} requests)", retry_after_s=FULL_RETRY_S
            )
        with self._writing():
            self._db.execute(
                "INSERT INTO batches (id, namespace, model, created, open) VALUES (?, ?, ?, ?, ?)",
                (batch.id, batch.namespace, batch.model, now, len(rows)),
            )
            self._db.executemany(
                "INSERT INTO items (batch, number, state, request_id, note, request)"
                " VALUES (?, ?, 'queued', ?, ?, ?)",
                rows,
            )
        return BatchState(status=ItemState.QUEUED, model=batch.model)

    def claim(self, count: int, now: float) -> list[Job]:
        """Up to `count` items to run, the oldest first, namespaces in turn."""
        jobs: list[Job] = []
        with self._writing():
            while len(jobs) < count and (row := self._next(now)) is not None:
                batch, number, tries, request = row
                try:
                    asked = _decode(request)
                except msgspec.MsgspecError:  # written by another release
                    error = InvalidRequest("the queued request is not understood any more")
                    self._answer(batch, number, (to_fault(error),), now)
                else:
                    jobs.append(Job(batch, number, tries, asked))
        return jobs

    def end(self, job: Job, outcome: Answered | Again, now: float) -> None:
        with self._writing():
            match outcome:
                case Answered(events):
                    self._answer(job.batch, job.number, events, now)
                case Again(tries, pause_s):
                    self._queue(job.batch, job.number, tries, now + pause_s)

    def state(self, batch: str, namespace: str) -> BatchState | None:
        """None: there is no such batch, or not of this namespace."""
        row = self._db.execute(
            "SELECT model, open, told FROM batches WHERE id = ? AND namespace = ?",
            (batch, namespace),
        ).fetchone()
        if row is None:
            return None
        model, still, told = ModelName(row[0]), row[1], bool(row[2])
        if still:
            begun = self._db.execute(
                "SELECT 1 FROM items WHERE batch = ? AND (state != 'queued' OR tries) LIMIT 1",
                (batch,),
            ).fetchone()
            return BatchState(status=ItemState.RUNNING if begun else ItemState.QUEUED, model=model)
        rows = self._db.execute(
            "SELECT request_id, note, events FROM items WHERE batch = ? ORDER BY number", (batch,)
        )
        answers = tuple(ItemAnswer(request_id=r, note=n, events=e) for r, n, e in rows)
        return BatchState(status="done", model=model, answers=answers, told=told)

    def told(self, batch: str, namespace: str) -> None:
        """The answers went out and are counted."""
        self._db.execute(
            "UPDATE batches SET told = 1 WHERE id = ? AND namespace = ? AND open = 0",
            (batch, namespace),
        )

    def sweep(self, now: float) -> None:
        """Give up what was queued for too long, and forget results that were kept long enough."""
        late = self._db.execute(
            "SELECT batch, number FROM items JOIN batches ON id = batch"
            " WHERE state = 'queued' AND created < ?",
            (now - KEEP_S,),
        ).fetchall()
        fault = to_fault(DeadlineExceeded(f"the region had no room within {KEEP_S / 3600:g} hours"))
        with self._writing():
            for batch, number in late:
                self._answer(batch, number, (fault,), now)
            self._db.execute("DELETE FROM batches WHERE done < ?", (now - KEEP_S,))

    def waiting(self) -> int:
        """Items without an answer."""
        count = "SELECT count(*) FROM items WHERE request IS NOT NULL"
        waiting: int = self._db.execute(count).fetchone()[0]
        return waiting

    def size(self) -> int:
        """What the file holds, free pages left out."""
        pages: int = self._db.execute("PRAGMA page_count").fetchone()[0]
        free: int = self._db.execute("PRAGMA freelist_count").fetchone()[0]
        return (pages - free) * _PAGE

    def _next(self, now: float) -> tuple[str, int, int, bytes] | None:
        """Mark one as running: batch, number, failures, request."""
        waiting = self._db.execute(
            "SELECT DISTINCT namespace FROM items JOIN batches ON id = batch"
            " WHERE state = 'queued' AND not_before <= ?",
            (now,),
        ).fetchall()
        if not waiting:
            return None
        namespace = min((name for (name,) in waiting), key=lambda name: self._turns.get(name, 0))
        self._turn += 1
        self._turns[namespace] = self._turn
        row: tuple[str, int, int, bytes] = self._db.execute(
            "SELECT batch, number, tries, request FROM items JOIN batches ON id = batch"
            " WHERE state = 'queued' AND not_before <= ? AND namespace = ?"
            " ORDER BY created, batch, number LIMIT 1",
            (now, namespace),
        ).fetchone()
        self._db.execute(
            "UPDATE items SET state = 'running' WHERE batch = ? AND number = ?", row[:2]
        )
        return row

    def _queue(self, batch: str, number: int, tries: int, not_before: float) -> None:
        self._db.execute(
            "UPDATE items SET state = 'queued', tries = ?, not_before = ?"
            " WHERE batch = ? AND number = ? AND state = 'running'",
            (tries, not_before, batch, number),
        )

    def _answer(self, batch: str, number: int, events: Sequence[Event], now: float) -> None:
        frames = b"".join(encode_frame(event) for event in events)
        changed = self._db.execute(
            "UPDATE items SET state = 'answered', request = NULL, events = ?"
            " WHERE batch = ? AND number = ? AND state != 'answered'",
            (frames, batch, number),
        ).rowcount
        self._db.execute(
            "UPDATE batches SET open = open - :changed, done = iif(open = :changed, :now, NULL)"
            " WHERE id = :batch AND :changed",
            {"changed": changed, "now": now, "batch": batch},
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
