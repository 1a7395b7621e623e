"""Length-prefixed msgpack frames: four bytes big-endian length, then one msgpack map.

Used edge ↔ region (events, status), node front ↔ rank. Sans I/O: bytes in, structs out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from core.errors import VersionSkew

T = TypeVar("T")

MAX_FRAME_BYTES = 64 << 20
_HEAD = 4
_head = struct.Struct(">I").unpack_from
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
        self._decode, self._known = _reader(kinds)
        self._tag_field = tag_field
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """The messages that `data` completes."""
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._wanted():
                return []
            data = bytes(self._buffer)
            self._buffer.clear()
        start, end = 0, len(data)
        messages: list[T] = []
        while end - start >= _HEAD:
            length = _length(data, start)
            if end - start - _HEAD < length:
                break
            start += _HEAD
            message = self._one(data[start : start + length])
            start += length
            if message is not None:
                messages.append(message)
        if start < end:
            self._buffer += data[start:]
        return messages

    @property
    def pending(self) -> int:
        """Bytes of a frame that has begun and not ended."""
        return len(self._buffer)

    def _wanted(self) -> int:
        """Bytes of the frame that has begun, as far as that is known."""
        if len(self._buffer) < _HEAD:
            return _HEAD
        return _HEAD + _length(self._buffer, 0)

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


def _length(data: bytes | bytearray, start: int) -> int:
    length: int = _head(data, start)[0]
    if length > MAX_FRAME_BYTES:
        raise VersionSkew(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return length


@cache
def _reader(kinds: Any) -> tuple[Callable[[bytes], Any], frozenset[str]]:
    """What decodes the union, and its tags: made once for all streams of one kind."""
    return msgspec.msgpack.Decoder(kinds).decode, _tags(kinds)


def _tags(kinds: Any) -> frozenset[str]:
    members = getattr(kinds, "__args__", (kinds,))
    return frozenset(str(member.__struct_config__.tag) for member in members)
