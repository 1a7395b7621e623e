"""Which Workers an edge serves: written by its host, read by each of its processes.

The file is replaced as a whole. Readers look at its stamp with each request, which costs a
microsecond and makes a change seen by all of them at once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from edge.workers.rest import Rest
from edge.workers.routes import Routes, read_route

_log = logging.getLogger("skerry.workers")
_NOTHING = (0, 0, 0)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A Worker that is served. `socket`: where its process, or who starts it, accepts requests.
    `token`: SHA-256 of what its process says when it asks the edge, in hex."""

    name: str
    tenant: str
    version: str
    socket: str
    used: str
    """Touched by who passes a request on: the host stops a Worker that nobody asks."""
    touch_s: float = 5.0
    """How often, at least, while requests come."""
    token: str
    routes: tuple[str, ...] = ()
    answer_s: float
    concurrency: int
    by_name: bool = True
    """Else its routes alone lead to it."""
    open: bool = False
    """Whether callers are told what it threw: while it is being written."""
    rest: Rest | None = None
    """It is not started for a while: whoever asks is refused."""


class _File(msgspec.Struct, frozen=True):
    entries: tuple[Entry, ...] = ()


def table_path(state: Path, edge: str) -> Path:
    return state / "workers" / edge / "table.json"


def digest_token(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()


def write_table(path: Path, entries: Iterable[Entry]) -> None:
    """Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        fresh.touch(mode=0o600)
        fresh.write_bytes(msgspec.json.encode(_File(tuple(entries))))
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


class Table:
    """The newest table. `domain`: see the topology's `workers`."""

    def __init__(self, path: Path, domain: str) -> None:
        self._path = path
        self._suffix = f".{domain}"
        self._stamp = _NOTHING
        self._named: dict[str, Entry] = {}
        self._tokens: dict[str, Entry] = {}
        self._routes: Routes[Entry] = Routes()

    def named(self, name: str) -> Entry | None:
        self._look()
        return self._named.get(name)

    def of_token(self, token: bytes) -> Entry | None:
        """The Worker whose process said `token`."""
        self._look()
        return self._tokens.get(digest_token(token))

    def of_host(self, host: str, path: str) -> Entry | None:
        """`host`: the Host header, with or without a port."""
        self._look()
        if not self._named:
            return None
        name = host.rpartition(":")[0] if host[-1:].isdigit() and ":" in host else host
        name = name.lower().removesuffix(".")
        own = None
        if name.endswith(self._suffix):
            own = self._named.get(name[: -len(self._suffix)])
        return self._routes.find(name, path, own) or (own if own and own.by_name else None)

    def _look(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        try:
            entries = msgspec.json.decode(self._path.read_bytes(), type=_File).entries
        except FileNotFoundError:
            entries = ()
        except (OSError, msgspec.MsgspecError) as error:
            _log.error("table of Workers unread path=%s why=%s", self._path, error)
            return
        self._stamp = stamp
        self._named = {one.name: one for one in entries}
        self._tokens = {one.token: one for one in entries}
        self._routes = Routes(
            [(read_route(pattern), one) for one in entries for pattern in one.routes]
        )

    def _read_stamp(self) -> tuple[int, int, int]:
        try:
            found = os.stat(self._path)
        except OSError:
            return _NOTHING
        return found.st_ino, found.st_size, found.st_mtime_ns
