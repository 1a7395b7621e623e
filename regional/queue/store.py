"""The queue on disk: SQLite, one connection, used by one thread.

What a request said is deleted with its row's answer, and deleted bytes are overwritten. What it
used is a row of its own, which outlives the batch until a ledger has it. Times are Unix seconds:
they must mean the same after a restart.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.batches import KEEP_S, BatchState, ItemAnswer, Owed, QueueLeft, Submission
from core.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    NoCapacity,
    to_fault,
)
from core.events import Done, Event, Fault, encode_frame
from core.types import GenerateRequest, ModelName, Usage
from regional.queue.rules import Again, Answered, ItemState, after_restart

MAX_ITEMS = 10_000
"""Requests that may be queued in one region."""
MAX_BYTES = 512 << 20
"""Of requests and answers together."""
FULL_RETRY_S = 60.0
ORPHAN_S = 3600.0
"""A ledger that has not asked for so long is gone: the next one that asks has what it was owed."""
PAGE_ITEMS = 500
_VERSION = 1
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
    created REAL NOT NULL, open INTEGER NOT NULL, done REAL, collector TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS items (
    batch TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE, number INTEGER NOT NULL,
    state TEXT NOT NULL, tries INTEGER NOT NULL DEFAULT 0, not_before REAL NOT NULL DEFAULT 0,
    request_id TEXT NOT NULL, note BLOB NOT NULL, account BLOB NOT NULL, request BLOB, events BLOB,
    PRIMARY KEY (batch, number)
) STRICT;
CREATE TABLE IF NOT EXISTS owed (
    request_id TEXT PRIMARY KEY, batch TEXT NOT NULL, collector TEXT NOT NULL,
    account BLOB NOT NULL, model TEXT NOT NULL, outcome TEXT NOT NULL,
    prompt INTEGER NOT NULL, completion INTEGER NOT NULL, cached INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS owed_to ON owed (collector);
CREATE INDEX IF NOT EXISTS owed_of ON owed (batch);
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

    def __init__(self, path: Path | None, ticks: Callable[[], float] = time.monotonic) -> None:
        self._ticks = ticks
        self._opened = ticks()
        self._asked: dict[str, float] = {}
        """When each ledger asked last."""
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
            self._prepare(path)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path}: the queue cannot be kept there: {error}") from error

    def close(self) -> None:
        self._db.close()

    def _prepare(self, path: Path | None) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if version != _VERSION and tables:
            raise ConfigError(f"{path}: a queue of another release; move it away")
        self._db.executescript(f"{_SCHEMA} PRAGMA user_version = {_VERSION};")

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
            (
                batch.id, i, one.request.id, one.note, one.account,
                msgspec.msgpack.encode(one.request),
            )
            for i, one in enumerate(batch.items)
        ]  # fmt: skip
        size = sum(len(row[-1]) for row in rows)
        if items + len(rows) > MAX_ITEMS or self.size() + size > MAX_BYTES:
            raise NoCapacity(
                f"the queue of this region is full ({items} requests)", retry_after_s=FULL_RETRY_S
            )
        with self._writing():
            self._db.execute(
                "INSERT INTO batches (id, namespace, model, created, open, collector)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (batch.id, batch.namespace, batch.model, now, len(rows), batch.collector),
            )
            self._db.executemany(
                "INSERT INTO items (batch, number, state, request_id, note, account, request)"
                " VALUES (?, ?, 'queued', ?, ?, ?, ?)",
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
            "SELECT model, open, NOT EXISTS (SELECT 1 FROM owed WHERE batch = id)"
            " FROM batches WHERE id = ? AND namespace = ?",
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

    def owed(self, collector: str) -> list[Owed]:
        """Up to PAGE_ITEMS that this ledger is to write down. What is owed to nobody, or to one
        that is gone, becomes this one's."""
        now = self._ticks()
        self._asked[collector] = now
        for (other,) in self._db.execute("SELECT DISTINCT collector FROM owed").fetchall():
            if not other or now - self._asked.get(other, self._opened) >= ORPHAN_S:
                self._db.execute(
                    "UPDATE owed SET collector = ? WHERE collector = ?", (collector, other)
                )
        rows = self._db.execute(
            "SELECT request_id, account, model, outcome, prompt, completion, cached FROM owed"
            " WHERE collector = ? LIMIT ?",
            (collector, PAGE_ITEMS),
        )
        return [
            Owed(
                request_id=name,
                account=account,
                model=ModelName(model),
                outcome=outcome,
                usage=Usage(
                    prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached
                ),
            )
            for name, account, model, outcome, prompt, completion, cached in rows
        ]

    def written(self, collector: str, request_ids: Sequence[str]) -> list[str]:
        """This ledger has them: those that were owed to it until now."""
        with self._writing():
            return [
                name
                for name in request_ids
                if self._db.execute(
                    "DELETE FROM owed WHERE request_id = ? AND collector = ?", (name, collector)
                ).rowcount
            ]

    def purge(self, namespace: str) -> int:
        """Delete the batches of a namespace, asked and answered, and overwrite what they said: how
        many those were. What is owed for them stays, for what never ran nothing."""
        with self._writing():
            self._db.execute(
                "INSERT OR IGNORE INTO owed (request_id, batch, collector, account, model, outcome,"
                " prompt, completion, cached) SELECT request_id, batch, collector, account, model,"
                " ?, 0, 0, 0 FROM items JOIN batches ON id = batch"
                " WHERE namespace = ? AND state != 'answered'",
                (Cancelled.code, namespace),
            )
            return self._db.execute(
                "DELETE FROM batches WHERE namespace = ?", (namespace,)
            ).rowcount

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

    def left(self) -> QueueLeft:
        (owed,) = self._db.execute("SELECT count(*) FROM owed").fetchone()
        (kept,) = self._db.execute("SELECT count(*) FROM batches").fetchone()
        return QueueLeft(waiting=self.waiting(), owed=owed, kept=kept)

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
        if changed:
            self._owe(batch, number, events[-1])
        self._db.execute(
            "UPDATE batches SET open = open - :changed, done = iif(open = :changed, :now, NULL)"
            " WHERE id = :batch AND :changed",
            {"changed": changed, "now": now, "batch": batch},
        )

    def _owe(self, batch: str, number: int, end: Event) -> None:
        usage = end.usage if isinstance(end, Done) else Usage(prompt_tokens=0, completion_tokens=0)
        self._db.execute(
            "INSERT OR IGNORE INTO owed (request_id, batch, collector, account, model, outcome,"
            " prompt, completion, cached) SELECT request_id, batch, collector, account, model,"
            " ?, ?, ?, ? FROM items JOIN batches ON id = batch WHERE batch = ? AND number = ?",
            (
                end.code if isinstance(end, Fault) else "ok",
                usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, batch, number,
            ),
        )  # fmt: skip

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")
