"""What source and receiver say to each other where the receiver reads.

::

    source      HELLO  (Read | Renew)*  End
    receiver    Welcome  Taken*  Ready        or at any time Refused, and the connection ends

The hello says where the source's memory is; a Read says which of it makes which piece. After the
hello both sides speak frames of `core.framing`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec

from core.errors import TransferFailed
from core.kv.ticket import MODEL_DIGEST_BYTES, TICKET_ID_BYTES, PieceKey, Ticket
from core.kv.transports.base import Piece
from core.kv.transports.words import Word

_MAGIC = b"SKR1"
_HELLO = struct.Struct(f">4s{TICKET_ID_BYTES}sQ{MODEL_DIGEST_BYTES}sH")
HELLO_BYTES = _HELLO.size


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """A rank's KV memory. `base`: its address, where the way needs one."""

    rank: int
    size: int
    base: int = 0


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """`segment` and `words` (the address of the page of words) are Mooncake's; over shared memory
    the descriptors that come with the hello stand for them, in the order of `memories`."""

    slot: int
    value: int
    memories: tuple[Memory, ...]
    segment: str = ""
    words: int = 0

    @property
    def word(self) -> Word:
        return Word(self.slot, self.value)


_Place = Annotated[int, msgspec.Meta(ge=0)]
_Length = Annotated[int, msgspec.Meta(ge=1)]


class Shown(msgspec.Struct, frozen=True, array_like=True):
    """A piece that can be read: where it lies, (rank, offset, size) after (rank, offset, size) in
    the order of the receiver, and its xxh3-64 where the way checks it."""

    rank: int
    group: int
    block: int
    spans: tuple[tuple[int, _Place, _Length], ...]
    digest: int | None = None

    @property
    def key(self) -> PieceKey:
        return PieceKey(self.rank, self.group, self.block)

    @property
    def size(self) -> int:
        return sum([size for _, _, size in self.spans])


class Read(msgspec.Struct, frozen=True, tag="read", tag_field="kind"):
    pieces: tuple[Shown, ...]


class Renew(msgspec.Struct, frozen=True, tag="renew", tag_field="kind"):
    pass


class End(msgspec.Struct, frozen=True, tag="end", tag_field="kind"):
    computed_tokens: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome", tag_field="kind"):
    pass


class Taken(msgspec.Struct, frozen=True, tag="taken", tag_field="kind"):
    """All pieces of a Read are verified."""

    pieces: int


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="kind"):
    pass


class Refused(msgspec.Struct, frozen=True, tag="refused", tag_field="kind"):
    """`reason` is a core.kv.handoff.Refusal."""

    reason: str


SourceSaid = Read | Renew | End
ReceiverSaid = Welcome | Taken | Ready | Refused


@dataclass(frozen=True, slots=True)
class Hello:
    ticket_id: str
    generation: int
    model: bytes
    source_bytes: int
    """Of the `Source` that follows: at most 65,535, whoever sends it."""


def encode_hello(ticket: Ticket, model: bytes, source: Source) -> bytes:
    """Raises TransferFailed when the ticket's id is none of ours."""
    body = msgspec.msgpack.encode(source)
    try:
        raw = bytes.fromhex(ticket.id)
        return _HELLO.pack(_MAGIC, raw, ticket.generation, model, len(body)) + body
    except (ValueError, struct.error) as error:
        raise TransferFailed(f"the ticket makes no hello: {error}") from error


def decode_hello(data: bytes | bytearray) -> Hello | None:
    """None: the bytes are no hello."""
    magic, raw, generation, model, length = _HELLO.unpack(data)
    if magic != _MAGIC:
        return None
    return Hello(raw.hex(), generation, model, length)


def decode_source(data: bytes | bytearray) -> Source | None:
    try:
        return msgspec.msgpack.decode(data, type=Source)
    except msgspec.MsgspecError:
        return None


def shown(piece: Piece, digest: int | None) -> Shown:
    return Shown(*piece.key, piece.spans, digest)
