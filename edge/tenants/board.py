"""The counts of all tenants on one machine: a file that every edge process of a state folder maps.

A page of 64-bit words for each tenant. Words are read and changed under one kernel lock, so counts
are exact over processes, and cost no system call but the lock's. A process may be killed between
any two words: each is whole, what it had reserved stays counted, and the next one who takes the
lock finds nothing to mend. A loss of power may take counts of the last seconds.

Each process has a seat, locked while it lives; streams are counted by seat, so that those of a
process that died are known for what they are.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import sys
from contextlib import ExitStack
from pathlib import Path

from core.errors import ConfigError, LimitsUnavailable
from edge.tenants.lock import KernelLock
from edge.tenants.meter import DAY_S, STEP_S, STEPS, Kind

SEATS = 64
"""Edge processes that one state folder has room for."""
_WORD, _WORDS = 8, 256
_BYTES = _WORD * _WORDS
_MAGIC = 0x736B65_72727900_01  # "skerry", layout 1
_RING, _AHEAD = 16, 3
"""Positions of a ring: the steps that count, and those to come whose leases are here already."""
assert STEPS + _AHEAD == _RING, "a step to come takes the place of one that no longer counts"
_ASTRAY = 3600 // STEP_S
"""Steps by which a page may be ahead of the clock. Beyond, it was turned by a clock that was wrong,
and would let nobody in until that time has come; of days, one."""

# Words of the first page.
_IS, _NAME = 0, 1
# Words of a tenant's.
_TAG, _STEP, _DAY, _COUNTED_TODAY, _GRANTED_TODAY = 0, 1, 2, 3, 4
_ELSEWHERE = {Kind.REQUESTS: 5, Kind.TOKENS: 6, Kind.DAY: 7}
_COUNTED = {Kind.REQUESTS: 16, Kind.TOKENS: 32}
_GRANTED = {Kind.REQUESTS: 48, Kind.TOKENS: 64}
_STREAMS = 128

_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Page:
    """One tenant's counts, touched only while the board is held. After `turn_to` its present step
    and day are those of the clock, or a little later where another process has seen that."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def turn_to(self, now: float) -> None:
        words = self._words
        step, day = int(now // STEP_S), int(now // DAY_S)
        gap = step - words[_STEP]
        if gap < -_ASTRAY:
            gap = _RING  # nothing of it is kept
        if gap > 0:
            for start in (*_COUNTED.values(), *_GRANTED.values()):
                for ahead in range(_AHEAD + 1, _AHEAD + 1 + min(gap, _RING)):
                    words[start + (step - gap + ahead) % _RING] = 0
            words[_STEP] = step
        if day > words[_DAY] or day < words[_DAY] - 1:
            words[_COUNTED_TODAY] = words[_GRANTED_TODAY] = words[_ELSEWHERE[Kind.DAY]] = 0
            words[_DAY] = day

    @property
    def step(self) -> int:
        present: int = self._words[_STEP]
        return present

    @property
    def day(self) -> int:
        present: int = self._words[_DAY]
        return present

    def counted(self, kind: Kind) -> list[int]:
        """In the windows that count, the oldest first."""
        if kind is Kind.DAY:
            return [self._words[_COUNTED_TODAY]]
        start, newest = _COUNTED[kind], self.step % _RING
        ring = self._words[start : start + _RING].tolist()
        return [*ring[newest + _AHEAD + 1 :], *ring[: newest + 1]][-STEPS:]

    def count(self, kind: Kind, window: int, amount: int) -> None:
        """Add `amount`, unless the window no longer counts."""
        if kind is Kind.DAY:
            if window == self.day:
                self._words[_COUNTED_TODAY] += amount
        elif 0 <= self.step - window < STEPS:
            self._words[_COUNTED[kind] + window % _RING] += amount

    def granted(self, kind: Kind, window: int) -> int:
        place = self._granted(kind, window)
        return 0 if place is None else self._words[place]

    def grant(self, kind: Kind, window: int, granted: int, elsewhere: int) -> None:
        """It never shrinks: answers may come in another order."""
        place = self._granted(kind, window)
        if place is not None:
            self._words[place] = max(self._words[place], granted)
            self._words[_ELSEWHERE[kind]] = elsewhere

    def elsewhere(self, kind: Kind) -> int:
        left: int = self._words[_ELSEWHERE[kind]]
        return left

    def _granted(self, kind: Kind, window: int) -> int | None:
        if kind is Kind.DAY:
            return _GRANTED_TODAY if window == self.day else None
        known = -STEPS < window - self.step <= _AHEAD
        return _GRANTED[kind] + window % _RING if known else None

    def streams(self) -> list[int]:
        """Open ones, by seat."""
        return self._words[_STREAMS : _STREAMS + SEATS].tolist()

    def add_stream(self, seat: int, number: int) -> None:
        self._words[_STREAMS + seat] += number

    def forget_streams(self, seat: int) -> None:
        self._words[_STREAMS + seat] = 0


class Board:
    """Raises ConfigError where the file cannot be used, LimitsUnavailable where only not now.
    Opened after a fork, never before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tags: dict[str, int] = {}
        self._pages: dict[int, Page] = {}
        with ExitStack() as undo:
            try:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, self._file)
                self._lock = KernelLock(path)
                undo.callback(self._lock.close)
                self._seats = _Seats(path.with_name(f"{path.name}.seats"))
                undo.callback(self._seats.close)
                with self._lock.held():
                    if os.fstat(self._file).st_size == 0:
                        self._append(0, _MAGIC, secrets.randbits(60))
                    self._map = self._mapped()
                    self._read_tags()
            except OSError as error:
                raise _unusable(path, error) from error
            self._undo = undo.pop_all()

    @property
    def name(self) -> str:
        """Of this board among all; kept in the file."""
        return f"{self._map[1][_NAME]:015x}"

    @property
    def seat(self) -> int:
        return self._seats.own

    def close(self) -> None:
        """Idempotent. This process's streams count as ended."""
        self._undo.close()

    def page(self, tenant: str, now: float) -> Turn:
        """For `with`: the tenant's counts, ours alone for as long as that lasts, and not from
        within itself. Raises LimitsUnavailable."""
        return Turn(self, tenant, now)

    def take(self, tenant: str, now: float) -> Page:
        """Ours until `leave`. Raises LimitsUnavailable."""
        self._lock.__enter__()
        try:
            size = os.fstat(self._file).st_size
            if size < len(self._map[0]):  # to touch what is not there would end the process
                raise LimitsUnavailable(f"{self._path} was cut short: restart this edge")
            page = self._page_of(tenant, size)
            page.turn_to(now)
        except BaseException:
            self._lock.__exit__()
            raise
        return page

    def leave(self) -> None:
        self._lock.__exit__()

    def is_alive(self, seat: int) -> bool:
        """Whether the process on a seat lives. Raises LimitsUnavailable."""
        try:
            return seat == self._seats.own or self._seats.is_taken(seat)
        except OSError as error:
            raise LimitsUnavailable(f"{self._path}: {error.strerror}") from error

    def _page_of(self, tenant: str, size: int) -> Page:
        tag = self._tags.get(tenant)
        if tag is None:
            digest = hashlib.blake2b(tenant.encode(), digest_size=_WORD).digest()
            tag = self._tags[tenant] = int.from_bytes(digest, "big") >> 1 or 1
        page = self._pages.get(tag)
        if page is not None:
            return page
        try:
            if size > len(self._map[0]):  # others have added pages
                self._remap()
            if tag not in self._pages:
                self._append(size, tag)
                self._remap()
        except OSError as error:
            raise LimitsUnavailable(f"{self._path}: {error.strerror}") from error
        except ConfigError as error:
            raise LimitsUnavailable(str(error)) from error
        return self._pages[tag]

    def _append(self, size: int, *words: int) -> None:
        """A page that begins with `words`, on a file of `size` bytes. Raises OSError, and leaves
        no part of one: blocks are there before they are mapped."""
        page = b"".join(word.to_bytes(_WORD, sys.byteorder) for word in words)
        if os.pwrite(self._file, page.ljust(_BYTES, b"\0"), size) < _BYTES:
            os.ftruncate(self._file, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _remap(self) -> None:
        self._map = self._mapped()
        self._read_tags()

    def _mapped(self) -> tuple[mmap.mmap, memoryview]:
        size = os.fstat(self._file).st_size
        if size < _BYTES or size % _BYTES:
            raise _no_ledger(self._path)
        mapped = mmap.mmap(self._file, size)
        words = memoryview(mapped).cast("q")
        if words[_IS] != _MAGIC:
            raise _no_ledger(self._path)
        return mapped, words

    def _read_tags(self) -> None:
        words = self._map[1]
        for start in range(_WORDS, len(words), _WORDS):
            page = Page(words[start : start + _WORDS])
            tag = words[start + _TAG]
            fresh = tag not in self._pages
            self._pages[tag] = page
            if fresh:  # what stands at our seat is of somebody who sat here and died
                page.forget_streams(self.seat)


class Turn:
    """A class and no generator, since every request takes several."""

    __slots__ = ("_board", "_now", "_tenant")

    def __init__(self, board: Board, tenant: str, now: float) -> None:
        self._board = board
        self._tenant = tenant
        self._now = now

    def __enter__(self) -> Page:
        return self._board.take(self._tenant, self._now)

    def __exit__(self, *_: object) -> None:
        self._board.leave()


class _Seats:
    """A file for each seat, locked by its process."""

    def __init__(self, folder: Path) -> None:
        """Takes a seat. Raises OSError, ConfigError where none is free."""
        self._folder = folder
        folder.mkdir(exist_ok=True, mode=0o700)
        for number in range(SEATS):
            file = self._take(number)
            if file is not None:
                self.own, self._file = number, file
                return
        raise ConfigError(f"{folder}: {SEATS} edge processes share this state folder already")

    def close(self) -> None:
        os.close(self._file)

    def is_taken(self, number: int) -> bool:
        file = self._take(number)
        if file is None:
            return True
        os.close(file)
        return False

    def _take(self, number: int) -> int | None:
        path = self._folder / f"{number:02}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        return file


def _no_ledger(path: Path) -> ConfigError:
    return ConfigError(f"{path} is no ledger: move it away; counts begin anew")


def _unusable(path: Path, error: OSError) -> ConfigError | LimitsUnavailable:
    if error.errno in _PASSING:
        return LimitsUnavailable(f"{path}: {error.strerror}")
    return ConfigError(f"{path}: cannot be used: {error.strerror}")
