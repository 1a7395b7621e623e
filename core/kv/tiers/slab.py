"""Slots in one file that survives restarts: bounded, encrypted for each namespace, crash-safe.

An entry is written as: head erased, content, head. What is torn all the same, because the machine
and not only the process has died, does not open: heads and contents are sealed (AES-256-GCM), and
each says which slot, model and namespace it is of, so nothing can be moved or exchanged either.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from core.errors import ConfigError
from core.kv.tiers import layout as lay
from core.kv.tiers.catalogue import Kept
from core.kv.tiers.entry import Entry
from core.kv.tiers.files import File, SystemFile
from core.kv.tiers.keyring import TAG_BYTES, Keyring, new_salt
from core.kv.tiers.layout import Head, Layout
from core.kv.tiers.shape import Shape
from core.kv.tiers.slots import Found

_HEADS_A_READ = 4096


class Slab:
    """See `slots.Slots`. `holder` is told to whoever finds the file locked.

    A file of another model, version, size or secret is begun anew, and what it held is counted.
    """

    def __init__(
        self,
        file: File,
        keyring: Keyring,
        shape: Shape,
        most_bytes: int,
        holder: str,
        *,
        foreign: int = 0,
    ) -> None:
        """Raises OSError."""
        self._file = file
        self._keyring = keyring
        self._shape = shape
        self._layout = Layout.within(most_bytes, shape.block_bytes, shape.digest)
        self._salts: dict[bytes, int] = {}
        """Where each namespace's salt lies."""
        self._ciphers: dict[bytes, AESGCM] = {}
        self._heads: dict[int, Head] = {}
        self._uses: Counter[bytes] = Counter()
        """Slots by namespace."""
        self._stamp = 0
        found = self._open()
        self._found = replace(found, foreign=found.foreign + foreign)
        file.write(holder.encode()[: lay.HOLDER_BYTES].ljust(lay.HOLDER_BYTES), lay.HOLDER_AT)

    @property
    def count(self) -> int:
        return self._layout.slots

    def found(self) -> Found:
        return self._found

    # ---------------------------------------------------------------- entries

    def write(self, slot: int, entry: Entry, content: bytes | bytearray) -> bool:
        """False where there are too many namespaces."""
        cipher = self._cipher(entry.owner)
        if cipher is None:
            return False
        self._erase(slot)
        nonce = secrets.token_bytes(lay.NONCE_BYTES)
        sealed = cipher.encrypt(
            nonce, content, self._bound(b"body", slot, entry.owner, entry.digest)
        )
        self._file.write(sealed, self._layout.content_at(slot))
        self._write_head(slot, Head(entry, self._next_stamp(), nonce))
        self._uses[entry.owner] += 1
        return True

    def read(self, slot: int, entry: Entry) -> bytes | None:
        head = self._heads.get(slot)
        cipher = self._ciphers.get(entry.owner)
        if cipher is None or head is None or head.entry != entry:
            return None
        size = self._shape.size(entry.groups) + lay.SEAL_BYTES
        sealed = self._file.read(size, self._layout.content_at(slot))
        bound = self._bound(b"body", slot, entry.owner, entry.digest)
        try:
            return cipher.decrypt(head.nonce, sealed, bound)
        except InvalidTag:
            return None

    def touch(self, kept: Sequence[Kept]) -> None:
        for slot, entry in kept:
            head = self._heads.get(slot)
            if head is not None and head.entry == entry:
                self._write_head(slot, head._replace(stamp=self._next_stamp()))

    def erase(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._erase(slot)

    def shred(self, owner: bytes) -> None:
        """On disk when this returns, as far as the disk keeps its word."""
        self.erase([slot for slot, head in self._heads.items() if head.entry.owner == owner])
        self._forget_salt(owner)
        self._file.sync()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the place where a holder stands is only told
            self._file.write(bytes(lay.HOLDER_BYTES), lay.HOLDER_AT)
        self._file.close()

    # ---------------------------------------------------------------- opening

    def _open(self) -> Found:
        ours = self._layout.superblock()
        ours += self._keyring.mac(ours)
        theirs = self._file.read(lay.SUPER_BYTES, 0)
        if theirs == ours:
            return self._scan()
        foreign = sum(1 for _ in records(self._file, lay.layout_of(theirs)))
        self._file.truncate()
        self._file.write(ours, 0)
        return Found(foreign=foreign)

    def _scan(self) -> Found:
        damaged = self._read_salts()
        foreign = 0
        for slot, record in records(self._file, self._layout):
            owner, nonce, sealed = _split(record)
            cipher = self._ciphers.get(owner)
            if cipher is None:
                foreign += 1
                continue
            bound = self._bound(b"head", slot, owner, b"")
            try:
                head = lay.unpack_head(owner, cipher.decrypt(nonce, sealed, bound))
            except InvalidTag:
                damaged += 1
                continue
            self._heads[slot] = head
            self._uses[owner] += 1
        order = sorted(self._heads.items(), key=lambda one: one[1].stamp)
        self._stamp = order[-1][1].stamp if order else 0
        return Found(tuple(Kept(slot, head.entry) for slot, head in order), foreign, damaged)

    def _read_salts(self) -> int:
        """How many do not hold."""
        damaged = 0
        table = self._file.read(lay.SALTS * lay.SALT_RECORD, self._layout.salt_at(0))
        for number in range(len(table) // lay.SALT_RECORD):
            record = table[number * lay.SALT_RECORD : (number + 1) * lay.SALT_RECORD]
            owner, said, mac = record[:TAG_BYTES], record[:-TAG_BYTES], record[-TAG_BYTES:]
            if owner == lay.EMPTY:
                continue
            if mac != self._keyring.mac(said):
                damaged += 1
                continue
            self._salts[owner] = number
            self._ciphers[owner] = self._keyring.cipher(owner, said[TAG_BYTES:])
        return damaged

    # ---------------------------------------------------------------- keys

    def _cipher(self, owner: bytes) -> AESGCM | None:
        """Makes the namespace's salt when it has none; None when there is no place for it."""
        known = self._ciphers.get(owner)
        if known is not None:
            return known
        number = self._free_salt()
        if number is None:
            return None
        said = owner + new_salt()
        self._file.write(said + self._keyring.mac(said), self._layout.salt_at(number))
        self._salts[owner] = number
        cipher = self._ciphers[owner] = self._keyring.cipher(owner, said[TAG_BYTES:])
        return cipher

    def _free_salt(self) -> int | None:
        if len(self._salts) == lay.SALTS:
            idle = next((owner for owner in self._salts if not self._uses[owner]), None)
            if idle is None:
                return None
            self._forget_salt(idle)
        taken = set(self._salts.values())
        return next(number for number in range(lay.SALTS) if number not in taken)

    def _forget_salt(self, owner: bytes) -> None:
        number = self._salts.pop(owner, None)
        self._ciphers.pop(owner, None)
        self._uses.pop(owner, None)
        if number is not None:
            self._file.write(bytes(lay.SALT_RECORD), self._layout.salt_at(number))

    # ---------------------------------------------------------------- inside

    def _write_head(self, slot: int, head: Head) -> None:
        owner = head.entry.owner
        nonce = secrets.token_bytes(lay.NONCE_BYTES)
        bound = self._bound(b"head", slot, owner, b"")
        sealed = self._ciphers[owner].encrypt(nonce, lay.pack_head(head), bound)
        self._file.write(owner + nonce + sealed, self._layout.head_at(slot))
        self._heads[slot] = head

    def _erase(self, slot: int) -> None:
        head = self._heads.pop(slot, None)
        if head is not None:
            self._uses[head.entry.owner] -= 1
            self._file.write(bytes(lay.HEAD_BYTES), self._layout.head_at(slot))

    def _bound(self, what: bytes, slot: int, owner: bytes, digest: bytes) -> bytes:
        return what + self._layout.shape + slot.to_bytes(4, "little") + owner + digest

    def _next_stamp(self) -> int:
        self._stamp += 1
        return self._stamp


def open_slab(
    path: Path,
    keyring: Keyring,
    shape: Shape,
    most_bytes: int,
    holder: str,
    *,
    foreign: int = 0,
) -> Slab:
    """Make or take up the file; it is locked until it is closed. `foreign` have been found beside
    it. Raises ConfigError, which says who has it, or why it cannot be used."""
    try:
        descriptor = lock_file(path)
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: {error.strerror}") from error
    file = SystemFile(descriptor)
    try:
        return Slab(file, keyring, shape, most_bytes, holder, foreign=foreign)
    except OSError as error:
        file.close()
        raise ConfigError(f"{path}: {error.strerror}") from error


def slab_name(node: str, pool: int, shape: Shape) -> str:
    return f"{node}.{pool}.{shape.digest.hex()}.slab"


def remove_foreign(path: Path) -> int:
    """Remove the slabs of the same node and pool that were made for other models and that nobody
    has open: how many blocks were in them. Raises ConfigError."""
    node, pool, _, _ = path.name.rsplit(".", 3)
    blocks = 0
    for other in sorted(path.parent.glob(f"{node}.{pool}.*.slab")):
        if other == path:
            continue
        try:
            blocks += _remove(other)
        except ConfigError:
            continue  # in use
        except OSError as error:
            raise ConfigError(f"{error.filename or other}: {error.strerror}") from error
    return blocks


def _remove(path: Path) -> int:
    """How many blocks were in it. Raises OSError, and ConfigError when somebody has it."""
    file = SystemFile(lock_file(path))
    try:
        layout = lay.layout_of(file.read(lay.SUPER_BYTES, 0))
        blocks = sum(1 for _ in records(file, layout))
        path.unlink()
    finally:
        file.close()
    return blocks


def lock_file(path: Path) -> int:
    """Its descriptor, open and ours alone. Raises OSError, and ConfigError when somebody has it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        told = os.pread(descriptor, lay.HOLDER_BYTES, lay.HOLDER_AT).strip(b"\0 ")
        os.close(descriptor)
        who = told.decode(errors="replace") or "another process"
        raise ConfigError(f"{path} is in use by {who}") from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def records(file: File, layout: Layout | None) -> Iterator[tuple[int, bytes]]:
    """(slot, record) of each head that is not empty."""
    if layout is None:
        return
    for first in range(0, layout.slots, _HEADS_A_READ):
        many = min(_HEADS_A_READ, layout.slots - first)
        table = file.read(many * lay.HEAD_BYTES, layout.head_at(first))
        for number in range(len(table) // lay.HEAD_BYTES):
            record = table[number * lay.HEAD_BYTES : (number + 1) * lay.HEAD_BYTES]
            if record[:TAG_BYTES] != lay.EMPTY:
                yield first + number, record
        if len(table) < many * lay.HEAD_BYTES:
            return


def _split(record: bytes) -> tuple[bytes, bytes, bytes]:
    """Owner, nonce, sealed head."""
    nonce_end = TAG_BYTES + lay.NONCE_BYTES
    sealed_end = nonce_end + lay.SEALED_HEAD_BYTES
    return record[:TAG_BYTES], record[TAG_BYTES:nonce_end], record[nonce_end:sealed_end]
