"""Reads a request body under limits: of bytes, as sent and as unpacked, and of time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import cast

from litestar.types import HTTPReceiveMessage, Receive

from core.errors import (
    BodyTooLarge,
    Cancelled,
    InvalidRequest,
    NoCapacity,
    RequestError,
    RequestTimeout,
    Unauthorized,
    UnsupportedEncoding,
)

_LINGER_S, _LINGER_BYTES = 2.0, 256 << 20
_GZIP = zlib.MAX_WBITS | 16
BODIES_AT_ONCE = 32
"""Full ones that may be under way together."""
CUTS_SHORT = (BodyTooLarge, RequestTimeout, Unauthorized, UnsupportedEncoding)
"""Refusals of a body that is not read to its end: its connection cannot go on."""


class Uploads:
    """The bodies that an edge reads: each of at most `limit` bytes, complete within `within_s`, and
    all that are under way together at most `total` bytes."""

    def __init__(self, *, limit: int, within_s: float, total: int) -> None:
        self._limit = limit
        self._within_s = within_s
        self._total = total
        self.held = 0
        """Bytes of bodies under way."""

    async def read(self, receive: Receive, headers: Mapping[bytes, bytes]) -> bytes:
        """The whole body, unpacked. The limit counts bytes that came and bytes that came out of
        them, whatever the headers promise (B11).

        Raises BodyTooLarge as soon as it is crossed, RequestTimeout, UnsupportedEncoding,
        InvalidRequest when it does not unpack, NoCapacity, Cancelled when the caller leaves before
        the end.
        """
        limit = self._limit
        body = _body(headers.get(b"content-encoding", b""), limit)
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        mine = 0
        try:
            async with asyncio.timeout(self._within_s):
                while True:
                    message = cast("HTTPReceiveMessage", await receive())
                    if message["type"] == "http.disconnect":
                        raise Cancelled("the caller left before the body was complete")
                    body.take(message["body"])
                    if not message["more_body"]:
                        return body.whole()
                    self.held += body.size - mine
                    mine = body.size
                    if self.held > self._total:
                        raise NoCapacity("too much is being uploaded", retry_after_s=1.0)
        except TimeoutError as error:
            late = f"the body was not complete within {self._within_s:g} s"
            raise RequestTimeout(late) from error
        finally:
            self.held -= mine


async def drain_body(receive: Receive) -> None:
    """Throw away what a caller still sends after a refusal, for a while.

    Closing with unread bytes resets the connection, which can eat the answer on its way.
    """
    seen = 0
    try:
        async with asyncio.timeout(_LINGER_S):
            while seen < _LINGER_BYTES:
                message = cast("HTTPReceiveMessage", await receive())
                if message["type"] == "http.disconnect" or not message["more_body"]:
                    return
                seen += len(message["body"])
    except TimeoutError:
        return  # long enough; the connection is closed on what is left


def lingers(error: RequestError, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a caller who is refused with `error` may still be sending."""
    return isinstance(error, CUTS_SHORT) and b"expect" not in headers


class _Plain:
    """A body as it comes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pieces = bytearray()

    @property
    def size(self) -> int:
        return len(self._pieces)

    def take(self, piece: bytes) -> None:
        self._pieces += piece
        if len(self._pieces) > self._limit:
            raise _too_large(self._limit)

    def whole(self) -> bytes:
        return bytes(self._pieces)


class _Packed:
    """A gzip body, unpacked as it comes; never more than the limit lies in memory."""

    def __init__(self, limit: int) -> None:
        self._out = _Plain(limit)
        self._came = 0
        self._limit = limit
        self._unpacker = zlib.decompressobj(_GZIP)

    @property
    def size(self) -> int:
        return self._out.size

    def take(self, piece: bytes) -> None:
        self._came += len(piece)
        if self._came > self._limit:
            raise _too_large(self._limit)
        while piece:
            if self._unpacker.eof:  # one gzip member may follow another
                self._unpacker = zlib.decompressobj(_GZIP)
            try:
                out = self._unpacker.decompress(piece, self._limit + 1 - self.size)
            except zlib.error as error:
                raise InvalidRequest("the body is not gzip, as its headers say") from error
            self._out.take(out)
            piece = self._unpacker.unused_data or self._unpacker.unconsumed_tail

    def whole(self) -> bytes:
        if self._came and not self._unpacker.eof:
            raise InvalidRequest("the gzip body ends before its end")
        return self._out.whole()


def _body(encoding: bytes, limit: int) -> _Plain | _Packed:
    name = encoding.strip().lower()
    if name in (b"", b"identity"):
        return _Plain(limit)
    if name in (b"gzip", b"x-gzip"):
        return _Packed(limit)
    shown = name[:40].decode("latin-1")
    raise UnsupportedEncoding(f"Content-Encoding {shown!r} is not supported; gzip is.")


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is over the limit of {limit} bytes")
