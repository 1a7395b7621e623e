"""API keys: their form, what is kept of them, and the file that keeps it.

A key is `sk-skerry-ID-SECRET`. ID names it in lists and logs. SECRET is 256 random bits and is
shown once; the file has the SHA-256 of the whole key. A slow or salted hash would add nothing: it
protects secrets that can be guessed, and nobody guesses 256 bits.

The file is append-only JSON lines, a record each: `created` or `revoked`. Writers hold a lock and
sync; a line that was torn by a crash is skipped, and the next record starts on a line of its own.
A revocation wins over every other record of its key, whatever their order, so that files of two
machines can be merged line by line.

Beside the file lies a mark from the first key on, with every revocation once more: a file that was
lost or cut short must not look like one that never had a key, nor make a revoked key good again.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from core.errors import ConfigError

_ID_CHARS, _SECRET_BYTES = 12, 32
_FORM = re.compile(r"^sk-skerry-(?P<id>[a-z2-7]{12})-[a-z2-7]{52}$")
_NOBODY = hashlib.sha256(b"no key has this digest").hexdigest()


class Created(msgspec.Struct, frozen=True, kw_only=True, tag="created", tag_field="kind"):
    """`at` and `expires` in Unix seconds; `digest` is SHA-256 of the key, in hex."""

    id: str
    tenant: str
    digest: str
    at: int
    label: str = ""
    expires: int | None = None


class Revoked(msgspec.Struct, frozen=True, kw_only=True, tag="revoked", tag_field="kind"):
    id: str
    at: int


KeyRecord = Created | Revoked
_encode = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[KeyRecord] = msgspec.json.Decoder(KeyRecord)


def new_key(
    tenant: str, *, now: int, label: str = "", expires: int | None = None
) -> tuple[str, Created]:
    """The key, for its owner alone, and what is kept of it."""
    name = _base32(secrets.token_bytes(8))[:_ID_CHARS]
    key = f"sk-skerry-{name}-{_base32(secrets.token_bytes(_SECRET_BYTES))}"
    return key, Created(
        id=name, tenant=tenant, digest=_digest(key), at=now, label=label, expires=expires
    )


def key_id(key: str) -> str | None:
    """ID of a text that has a key's form, else None."""
    form = _FORM.match(key)
    return form["id"] if form else None


class KeyBook:
    """What is known of keys: a fold over records, in any order and however often. `made`: keys were
    made once, even where none is known any more."""

    def __init__(self, records: Iterable[KeyRecord] = (), *, made: bool = False) -> None:
        self._made = made
        self._created: dict[str, Created] = {}
        self._revoked: dict[str, Revoked] = {}
        for record in records:
            self.add(record)

    def __len__(self) -> int:
        """Keys that were ever made, revoked ones too."""
        return len(self._created)

    @property
    def made(self) -> bool:
        """Whether there ever was a key: from then on nobody comes in without one."""
        return self._made or bool(self._created or self._revoked)

    def add(self, record: KeyRecord) -> bool:
        """Whether it says something new."""
        known = self._revoked if isinstance(record, Revoked) else self._created
        if record.id in known:
            return False
        if isinstance(record, Revoked):
            self._revoked[record.id] = record
        else:
            self._created[record.id] = record
        return True

    def created(self) -> list[Created]:
        """The oldest first."""
        return sorted(self._created.values(), key=lambda one: (one.at, one.id))

    def revoked(self, name: str) -> Revoked | None:
        return self._revoked.get(name)

    def records(self) -> Iterator[KeyRecord]:
        yield from self.created()
        yield from sorted(self._revoked.values(), key=lambda one: (one.at, one.id))

    def check(self, key: str, now: float) -> Created | None:
        """The record of a key that is good now. The comparison takes the same time whether the ID
        is known or not, and wherever digests differ."""
        found = self._created.get(key_id(key) or "")
        same = hmac.compare_digest(_digest(key), found.digest if found else _NOBODY)
        if found is None or not same or found.id in self._revoked:
            return None
        return None if found.expires is not None and now >= found.expires else found


def parse_lines(text: bytes) -> tuple[list[KeyRecord], int]:
    """The records of a file, and how many lines were none (torn ones)."""
    records: list[KeyRecord] = []
    torn = 0
    for line in text.split(b"\n"):
        if not line.strip():
            continue
        try:
            records.append(_decoder.decode(line))
        except msgspec.MsgspecError:
            torn += 1
    return records, torn


def as_lines(records: Iterable[KeyRecord]) -> bytes:
    return b"".join(_encode(record) + b"\n" for record in records)


def read_book(path: Path) -> tuple[KeyBook, int]:
    """What the file at `path` says, and how many of its lines were torn. Raises ConfigError."""
    try:
        marked = marked_by(path)
        text = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    records, torn = parse_lines(text)
    made = marked is not None or torn > 0
    return KeyBook([*records, *(marked or ())], made=made), torn


def marked_by(path: Path) -> list[KeyRecord] | None:
    """The revocations in the mark of the key file at `path`; None where no key was ever made in it.
    Whoever reads both reads this first: it has nothing that the file had not. Raises OSError."""
    try:
        return parse_lines(mark_of(path).read_bytes())[0]
    except FileNotFoundError:
        return None


def mark(path: Path, revoked: Iterable[Revoked] = ()) -> None:
    """From now on keys were made in the key file at `path`, and `revoked` are in its mark too.
    Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    with open(os.open(mark_of(path), flags, 0o600), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held = file.read()
        book = KeyBook(parse_lines(held)[0])
        if fresh := [record for record in revoked if book.add(record)]:
            file.write((b"" if held.endswith(b"\n") or not held else b"\n") + as_lines(fresh))
            file.flush()
            os.fsync(file.fileno())


def mark_of(path: Path) -> Path:
    """The file beside the key file at `path`."""
    return path.with_name(f"{path.name}.made")


def append_new(path: Path, records: Sequence[KeyRecord]) -> list[KeyRecord]:
    """Append those of `records` that say something new; they are on disk when this returns.

    Raises ConfigError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            held = file.read()
            book = KeyBook(parse_lines(held)[0])
            fresh = [record for record in records if book.add(record)]
            if book.made:
                mark(path)
            start = b"" if held.endswith(b"\n") or not held else b"\n"
            file.write(start + as_lines(fresh) if fresh else b"")
            file.flush()
            os.fsync(file.fileno())
            if book.made:
                mark(path, (one for one in book.records() if isinstance(one, Revoked)))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    return fresh


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()
