"""How a slab file is laid out, as plain bytes; what it holds is sealed by `slab`.

::

    0        superblock: magic, version, slots, content size, shape, MAC; who has it open
    4 KiB    salts: 4,096 records of 64 bytes: owner, salt, MAC
    260 KiB  heads: one of 256 bytes a slot: owner, nonce, sealed head
    then     contents: one a slot, sealed, in steps of 4 KiB

Heads lie together, so that a start reads them in one go. A record whose owner is zeros is empty.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from core.kv.tiers.entry import Entry
from core.kv.tiers.keyring import SALT_BYTES, TAG_BYTES
from core.kv.tiers.shape import SHAPE_BYTES
from core.types import BLOCK_TOKENS

VERSION = 1
PAGE = 4096
SEAL_BYTES = 16
"""What authentication adds to a text."""
NONCE_BYTES = 12
HOLDER_AT, HOLDER_BYTES = 1024, 256
SALTS = 4096
"""Namespaces that may have blocks in one slab."""
SALT_RECORD = TAG_BYTES + SALT_BYTES + TAG_BYTES
HEAD_BYTES = 256
EMPTY = bytes(TAG_BYTES)

_MAGIC = b"SKRYSLAB"
_SUPER = struct.Struct(f"<8sIIQ{SHAPE_BYTES}s")
SUPER_BYTES = _SUPER.size + TAG_BYTES
_HEAD = struct.Struct(f"<16s16s{BLOCK_TOKENS}IIQQ{NONCE_BYTES}s")


class Head(NamedTuple):
    """`stamp` counts uses; `nonce` is that of the content."""

    entry: Entry
    stamp: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """`content`: bytes of the largest content, unsealed."""

    slots: int
    content: int
    shape: bytes

    @classmethod
    def within(cls, most_bytes: int, content: int, shape: bytes) -> Layout:
        """As many slots as fit."""
        fixed = PAGE + SALTS * SALT_RECORD
        slots = max(0, most_bytes - fixed - PAGE) // (HEAD_BYTES + _stride(content))
        return cls(slots, content, shape)

    def superblock(self) -> bytes:
        """Without its MAC."""
        return _SUPER.pack(_MAGIC, VERSION, self.slots, self.content, self.shape)

    def salt_at(self, number: int) -> int:
        return PAGE + number * SALT_RECORD

    def head_at(self, slot: int) -> int:
        return self.salt_at(SALTS) + slot * HEAD_BYTES

    def content_at(self, slot: int) -> int:
        heads = -(-self.slots * HEAD_BYTES // PAGE) * PAGE
        return self.head_at(0) + heads + slot * _stride(self.content)


def layout_of(superblock: bytes) -> Layout | None:
    """What an older file says of itself; None for what is no slab of this version."""
    if len(superblock) < _SUPER.size:
        return None
    magic, version, slots, content, shape = _SUPER.unpack_from(superblock)
    if magic != _MAGIC or version != VERSION:
        return None
    return Layout(slots, content, shape)


def pack_head(head: Head) -> bytes:
    entry = head.entry
    return _HEAD.pack(
        entry.digest, entry.parent, *entry.token_ids, entry.groups, entry.check, head.stamp,
        head.nonce,
    )  # fmt: skip


def unpack_head(owner: bytes, data: bytes) -> Head:
    digest, parent, *token_ids, groups, check, stamp, nonce = _HEAD.unpack(data)
    return Head(Entry(owner, digest, parent, tuple(token_ids), groups, check), stamp, nonce)


SEALED_HEAD_BYTES = _HEAD.size + SEAL_BYTES


def _stride(content: int) -> int:
    return -(-(content + SEAL_BYTES) // PAGE) * PAGE
