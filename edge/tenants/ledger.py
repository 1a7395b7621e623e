"""The counts of all tenants on one machine: a SQLite file that every edge process of a state folder
opens.

SQLite, because a process may be killed in the middle of any line and the counts must stay whole
and shared. A kernel lock is taken before each transaction: waiting for SQLite's own means sleeping
a millisecond at a time (measured with two writers: p99 1.1 ms, with the lock 0.2). No sync to
disk: a loss of power takes counts of the last seconds, the death of a process takes nothing.

A reservation is a row with a lease. Its process renews it; one whose process is gone ends by
itself and is charged whole, since nobody knows what was delivered.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError, LimitsUnavailable
from edge.tenants.lock import KernelLock
from edge.tenants.meter import DAY_S, MINUTE_S, Fits, Kind, Limit, Meter, Verdict, decide

_VERSION = 1
_SCHEMA = """
create table if not exists meters (
    tenant text, kind text, win integer,
    granted integer not null default 0, elsewhere integer not null default 0,
    used integer not null default 0, reserved integer not null default 0,
    primary key (tenant, kind, win)) without rowid;
create table if not exists reservations (
    id text primary key, tenant text, owner text, minute integer, day integer,
    tokens integer, expires real) without rowid;
create index if not exists reservations_of on reservations (tenant);
create table if not exists facts (name text primary key, value text) without rowid;
"""
_COUNT = f"""
update meters set
    reserved = reserved
        + case kind when '{Kind.REQUESTS}' then :request_reserved else :token_reserved end,
    used = used + case kind when '{Kind.REQUESTS}' then :request_used else :token_used end
where tenant = :tenant
    and ((kind in ('{Kind.REQUESTS}', '{Kind.TOKENS}') and win = :minute)
        or (kind = '{Kind.DAY}' and win = :day))
"""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that wants in. `leased`: a window grants what was leased for it, not its limit.
    `final`: it is used at once, with nothing to settle later."""

    id: str
    tenant: str
    tokens: int
    limits: Sequence[Limit]
    max_streams: int | None
    leased: bool
    final: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """`meters` are after the reservation where the verdict is `Fits`, else as they were found."""

    verdict: Verdict
    meters: Mapping[Kind, Meter]


class Ledger:
    """`owner` names this process among those that hold reservations. Opened after a fork, never
    before. All methods raise LimitsUnavailable when the lock cannot be had."""

    def __init__(self, path: Path, *, owner: str, lease_s: float) -> None:
        """Raises ConfigError where the file cannot be used, LimitsUnavailable where only not now:
        a worker that meets the latter is started again, and the former ends its whole edge."""
        self._owner = owner
        self._lease_s = lease_s
        with ExitStack() as undo:
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._lock = KernelLock(path.with_name(f"{path.name}.lock"))
                undo.callback(self._lock.close)
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                self._db = sqlite3.connect(path, isolation_level=None)
                undo.callback(self._db.close)
                self.name = self._prepare()
                """This ledger among those that lease from one Redis; kept in the file."""
            except sqlite3.Error as error:
                raise _unusable(path, error) from error
            except OSError as error:
                raise ConfigError(f"{path}: cannot be used: {error.strerror}") from error
            undo.pop_all()

    def _prepare(self) -> str:
        """Its name. Raises sqlite3.Error."""
        with self._lock.held():
            self._db.execute("pragma busy_timeout = 500")
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = off")
            if self._db.execute("pragma user_version").fetchone()[0] != _VERSION:
                self._db.executescript(f"{_SCHEMA} pragma user_version = {_VERSION};")
            if (found := self._db.execute("pragma quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(found)
            self._db.execute(
                "insert or ignore into facts values ('name', ?)", (secrets.token_hex(8),)
            )
            name: str = self._db.execute("select value from facts where name = 'name'").fetchone()[
                0
            ]
        return name

    def close(self) -> None:
        """Idempotent."""
        self._db.close()
        self._lock.close()

    def reserve(self, ask: Ask, now: float) -> Reply:
        """Reserve all that `ask` needs, or nothing."""
        with self._transaction():
            reply = self._decide(ask, now)
            if not isinstance(reply.verdict, Fits) and self._sweep(now):
                reply = self._decide(ask, now)
            if not isinstance(reply.verdict, Fits):
                return reply
            self._add(ask, now)
            if not ask.final:
                self._remember(ask, now)
        after = {
            limit.kind: _reserving(reply.meters[limit.kind], limit.need(ask.tokens))
            for limit in ask.limits
        }
        return Reply(reply.verdict, after)

    def adjust(self, request_id: str, tokens: int) -> None:
        """The reservation is for `tokens` from now on, also where that is more than was free."""
        with self._transaction():
            row = self._db.execute(
                "select tenant, minute, day, tokens from reservations where id = ?", (request_id,)
            ).fetchone()
            if row is None:
                return
            tenant, minute, day, before = row
            self._db.execute(
                "update reservations set tokens = ? where id = ?", (tokens, request_id)
            )
            self._count(tenant, minute, day, (tokens - before, 0))

    def settle(self, request_id: str, tokens: int, *, counts: bool = True) -> bool:
        """End a reservation with what was used; `counts` False gives the request itself back too.
        False when there is none (any more): settling twice changes nothing."""
        with self._transaction():
            return self._settle(request_id, tokens, counts=counts)

    def renew(self, now: float) -> None:
        """Our reservations live for another lease; those of the dead end. Old windows go."""
        with self._transaction():
            self._db.execute(
                "update reservations set expires = ? where owner = ?",
                (now + self._lease_s, self._owner),
            )
            self._sweep(now)
            self._db.execute(
                "delete from meters where win < case kind when ? then ? else ? end",
                (Kind.DAY, int(now // DAY_S) - 1, int(now // MINUTE_S) - 1),
            )

    def meter(self, tenant: str, limit: Limit, window: int) -> Meter:
        with _named_errors():
            row = self._db.execute(
                "select granted, elsewhere, used, reserved from meters"
                " where tenant = ? and kind = ? and win = ?",
                (tenant, limit.kind, window),
            ).fetchone()
        return Meter(*row) if row else Meter()

    def grant(self, tenant: str, limit: Limit, window: int, granted: int, elsewhere: int) -> None:
        """What this ledger has leased of a window so far, by Redis's count; it never shrinks."""
        with self._transaction():
            self._db.execute(
                "insert into meters (tenant, kind, win, granted, elsewhere) values (?, ?, ?, ?, ?)"
                " on conflict do update set granted = max(granted, excluded.granted),"
                " elsewhere = excluded.elsewhere",
                (tenant, limit.kind, window, granted, elsewhere),
            )

    def open_streams(self, tenant: str) -> int:
        count: int = self._db.execute(
            "select count(*) from reservations where tenant = ?", (tenant,)
        ).fetchone()[0]
        return count

    def _add(self, ask: Ask, now: float) -> None:
        column = "used" if ask.final else "reserved"
        values: list[str | int] = []
        for limit in ask.limits:
            values += (ask.tenant, limit.kind, limit.window(now), limit.need(ask.tokens))
        if values:
            rows = ", ".join(["(?, ?, ?, ?)"] * len(ask.limits))
            self._db.execute(
                f"insert into meters (tenant, kind, win, {column}) values {rows}"
                f" on conflict do update set {column} = {column} + excluded.{column}",
                values,
            )

    def _remember(self, ask: Ask, now: float) -> None:
        minute, day, expires = int(now // MINUTE_S), int(now // DAY_S), now + self._lease_s
        self._db.execute(
            "insert into reservations values (?, ?, ?, ?, ?, ?, ?)",
            (ask.id, ask.tenant, self._owner, minute, day, ask.tokens, expires),
        )

    def _decide(self, ask: Ask, now: float) -> Reply:
        found = {
            (kind, window): Meter(*counts)
            for kind, window, *counts in self._db.execute(
                "select kind, win, granted, elsewhere, used, reserved from meters"
                " where tenant = ? and win in (?, ?)",
                (ask.tenant, int(now // MINUTE_S), int(now // DAY_S)),
            )
        }
        meters: dict[Kind, Meter] = {}
        for limit in ask.limits:
            meter = found.get((limit.kind, limit.window(now)), Meter())
            if not ask.leased:
                meter = Meter(limit.amount, 0, meter.used, meter.reserved)
            meters[limit.kind] = meter
        streams = self.open_streams(ask.tenant) if ask.max_streams is not None else 0
        verdict = decide(
            ask.limits,
            meters,
            tokens=ask.tokens,
            open_streams=streams,
            max_streams=ask.max_streams,
        )
        return Reply(verdict, meters)

    def _sweep(self, now: float) -> int:
        """End the reservations whose lease is over; how many there were."""
        rows = self._db.execute(
            "select id, tokens from reservations where expires < ?", (now,)
        ).fetchall()
        for request_id, tokens in rows:
            self._settle(request_id, tokens, counts=True)
        return len(rows)

    def _settle(self, request_id: str, tokens: int, *, counts: bool) -> bool:
        row = self._db.execute(
            "delete from reservations where id = ? returning tenant, minute, day, tokens",
            (request_id,),
        ).fetchone()
        if row is None:
            return False
        tenant, minute, day, reserved = row
        self._count(tenant, minute, day, (-reserved, tokens), (-1, int(counts)))
        return True

    def _count(
        self,
        tenant: str,
        minute: int,
        day: int,
        tokens: tuple[int, int],
        requests: tuple[int, int] = (0, 0),
    ) -> None:
        """What is added to (reserved, used)."""
        values = {
            "request_reserved": requests[0], "request_used": requests[1],
            "token_reserved": tokens[0], "token_used": tokens[1],
            "tenant": tenant, "minute": minute, "day": day,
        }  # fmt: skip
        self._db.execute(_COUNT, values)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._held():
            try:
                self._db.execute("begin immediate")
                yield
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("rollback")
                raise
            else:
                self._db.execute("commit")

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._lock.held(), _named_errors():
            yield


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise LimitsUnavailable(f"the ledger of limits failed: {error}") from error


def _unusable(path: Path, error: sqlite3.Error) -> ConfigError | LimitsUnavailable:
    match getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF:
        case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_ERROR:
            return ConfigError(f"{path} is no ledger: move it away; counts begin anew")
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return ConfigError(f"{path}: cannot be used: {error}")
        case _:
            return LimitsUnavailable(f"the ledger of limits failed: {error}")


def _reserving(meter: Meter, amount: int) -> Meter:
    return Meter(meter.granted, meter.elsewhere, meter.used, meter.reserved + amount)
