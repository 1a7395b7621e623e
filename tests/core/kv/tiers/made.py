"""Blocks, shapes and files for tests of the tiers."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from core.kv.geometry import KVGeometry, KVGroup
from core.kv.tiers.entry import Entry
from core.kv.tiers.files import File
from core.kv.tiers.keyring import Keyring
from core.kv.tiers.shape import Shape
from core.prefix import block_root, next_block_hash
from core.types import BLOCK_TOKENS

FINGERPRINT = b"model"
SECRET = b"a secret of the tests"
GEOMETRY = KVGeometry(
    groups=(
        KVGroup(name="full", layers=2, kv_heads=1, head_dim=8, dtype="float32"),
        KVGroup(name="window", kind="window", window=32, layers=1, kv_heads=1, head_dim=4,
                dtype="float32"),
    ),
    blocks=(64, 64),
)  # fmt: skip
SHAPE = Shape.of(FINGERPRINT, {0: GEOMETRY})
BOTH = 0b11


def ids(number: int) -> tuple[int, ...]:
    return tuple(range(number * 100, number * 100 + BLOCK_TOKENS))


def chain(count: int, namespace: str = "", secret: bytes = SECRET) -> list[tuple[Entry, bytes]]:
    """Blocks 0… of one prompt, with their content."""
    parent = block_root(FINGERPRINT, namespace)
    owner = Keyring(secret).tag(namespace)
    made: list[tuple[Entry, bytes]] = []
    for number in range(count):
        digest = next_block_hash(parent, ids(number))
        content = content_of(digest, SHAPE.block_bytes)
        entry = Entry(owner, digest, parent, ids(number), BOTH, xxh3_64_intdigest(content))
        made.append((entry, content))
        parent = digest
    return made


def content_of(digest: bytes, size: int) -> bytes:
    return (digest * (size // len(digest) + 1))[:size]


class FullDisk:
    """A file on a disk that has no room from byte `full_at` on."""

    def __init__(self, file: File, full_at: int) -> None:
        self._file = file
        self.full_at = full_at

    def read(self, size: int, offset: int) -> bytes:
        return self._file.read(size, offset)

    def write(self, data: bytes | bytearray, offset: int) -> None:
        if offset + len(data) > self.full_at:
            room = max(0, self.full_at - offset)
            self._file.write(data[:room], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        self._file.write(data, offset)

    def truncate(self) -> None:
        self._file.truncate()

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def digests(kept: Sequence[tuple[Entry, bytes]]) -> list[bytes]:
    return [entry.digest for entry, _ in kept]
