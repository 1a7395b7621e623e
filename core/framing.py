"""Length-prefixed msgpack frames: four bytes big-endian length, then one msgpack map.

Used edge ↔ region (events, status), node front ↔ rank. Sans I/O: bytes in, structs out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from core.errors import VersionSkew

T = TypeVar("T")

MAX_FRAME_BYTES = 64 << 20
_HEAD = 4
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    """The wire form of one struct."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_HEAD, "big") + body


class FrameDecoder(Generic[T]):
    """Incremental decoder of one stream of frames of the tagged union `kinds`.

    Frames whose tag is not in the union are skipped: a newer peer may say things that we do not
    know (DESIGN §5). Anything else that does not decode raises `VersionSkew`.
    """

    def __init__(self, kinds: Any, *, tag_field: str = "kind") -> None:  # a union is not a type[T]
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._known = _tags(kinds)
        self._tag_field = tag_field
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield each message that `data` completes."""
        self._buffer += data
        start, end = 0, len(self._buffer)
        messages: list[T] = []
        while end - start >= _HEAD:
            length = int.from_bytes(self._buffer[start : start + _HEAD], "big")
            if length > MAX_FRAME_BYTES:
                raise VersionSkew(
                    f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}"
                )
            if end - start - _HEAD < length:
                break
            body = bytes(self._buffer[start + _HEAD : start + _HEAD + length])
            start += _HEAD + length
            message = self._one(body)
            if message is not None:
                messages.append(message)
        del self._buffer[:start]
        yield from messages

    @property
    def pending(self) -> int:
        """Bytes of a frame that has begun and not ended."""
        return len(self._buffer)

    def _one(self, body: bytes) -> T | None:
        try:
            message: T = self._decode(body)
        except msgspec.MsgspecError as error:
            if self._is_unknown_kind(body):
                return None
            raise VersionSkew(f"a frame does not decode: {error}") from error
        return message

    def _is_unknown_kind(self, body: bytes) -> bool:
        try:
            head = msgspec.msgpack.decode(body)
        except msgspec.MsgspecError:
            return False
        kind = head.get(self._tag_field) if isinstance(head, dict) else None
        return isinstance(kind, str) and kind not in self._known


def _tags(kinds: Any) -> frozenset[str]:
    members = getattr(kinds, "__args__", (kinds,))
    return frozenset(str(member.__struct_config__.tag) for member in members)
