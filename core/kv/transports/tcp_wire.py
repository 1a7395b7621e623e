"""The bytes on a node's data socket; no I/O. All numbers are big-endian.

::

    sender     HELLO  (PIECE bytes | RENEW)*  END
    receiver   WELCOME  READY          or at any time FAILED, and the connection ends

Further connections of the same sender begin with JOIN, which looks like HELLO otherwise. READY
comes on each of them, once END has come on all and every piece is verified.

The hello is fixed in size, so that nothing of an unknown peer's choosing is ever allocated.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from core.errors import TransferFailed
from core.kv.handoff import Refusal
from core.kv.ticket import MODEL_DIGEST_BYTES, TICKET_ID_BYTES, PieceKey, Ticket

_MAGIC = b"SKV1"
_JOIN_MAGIC = b"SKVJ"
_HELLO = struct.Struct(f">4s{TICKET_ID_BYTES}sQ{MODEL_DIGEST_BYTES}s")
_HEAD = struct.Struct(">BBHIIQ")
_REPLY = struct.Struct(">BB")
HELLO_BYTES = _HELLO.size
HEAD_BYTES = _HEAD.size
REPLY_BYTES = _REPLY.size

_REFUSALS = (
    Refusal.TICKET,
    Refusal.TAKEN,
    Refusal.CLOSED,
    Refusal.PIECE,
    Refusal.CHECKSUM,
    Refusal.INCOMPLETE,
    Refusal.EXPIRED,
    Refusal.ABORTED,
    Refusal.PROTOCOL,
)
"""Position is the code on the wire: append only."""


class Kind(IntEnum):
    """What a head announces."""

    PIECE = 1
    RENEW = 2
    END = 3


_KINDS = {int(kind): kind for kind in Kind}


class Reply(IntEnum):
    """What the receiver says."""

    WELCOME = 1
    READY = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Hello:
    ticket_id: str
    generation: int
    model: bytes
    joins: bool = False


class Head(NamedTuple):
    """`size` and `digest` (xxh3-64) describe the bytes that follow a PIECE; for END, `size` is the
    number of computed tokens."""

    kind: Kind
    key: PieceKey
    size: int
    digest: int


def encode_hello(ticket: Ticket, model: bytes, *, joins: bool = False) -> bytes:
    """Raises TransferFailed when the ticket's id is none of ours."""
    try:
        raw = bytes.fromhex(ticket.id)
    except ValueError as error:
        raise TransferFailed("the ticket's id is not hexadecimal") from error
    if len(raw) != TICKET_ID_BYTES:
        raise TransferFailed(f"the ticket's id has {len(raw)} bytes")
    return _HELLO.pack(_JOIN_MAGIC if joins else _MAGIC, raw, ticket.generation, model)


def decode_hello(data: bytes | bytearray) -> Hello | None:
    """None: the bytes are no hello."""
    magic, raw, generation, model = _HELLO.unpack(data)
    if magic not in (_MAGIC, _JOIN_MAGIC):
        return None
    return Hello(raw.hex(), generation, model, joins=magic == _JOIN_MAGIC)


def encode_piece(key: PieceKey, size: int, digest: int) -> bytes:
    return _HEAD.pack(Kind.PIECE, key.rank, key.group, key.block, size, digest)


def encode_renew() -> bytes:
    return _HEAD.pack(Kind.RENEW, 0, 0, 0, 0, 0)


def encode_end(computed_tokens: int) -> bytes:
    return _HEAD.pack(Kind.END, 0, 0, 0, computed_tokens, 0)


def decode_head(data: bytes | bytearray) -> Head | None:
    """None: the bytes are no head."""
    code, rank, group, index, size, digest = _HEAD.unpack(data)
    kind = _KINDS.get(code)
    return None if kind is None else Head(kind, PieceKey(rank, group, index), size, digest)


def encode_reply(reply: Reply, refusal: Refusal | None = None) -> bytes:
    return _REPLY.pack(reply, 0 if refusal is None else _REFUSALS.index(refusal))


def decode_reply(data: bytes) -> tuple[Reply, Refusal] | None:
    """The reply, and the refusal that belongs to FAILED. None: the bytes are no reply."""
    kind, code = _REPLY.unpack(data)
    if kind not in (Reply.WELCOME, Reply.READY, Reply.FAILED) or code >= len(_REFUSALS):
        return None
    return Reply(kind), _REFUSALS[code]
