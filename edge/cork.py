"""A transport that sends what one turn of the event loop wrote in one piece.

A server writes an answer's head and its first part apart, and every piece on a socket costs a call
to the kernel and wakes the reader on the other side.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Corked:
    """Stands before a transport for a protocol that writes; all else is the transport's own."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """After what was written."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._parts.clear()
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:  # the rest of the interface, as it is
        return getattr(self._transport, name)

    def _flush(self) -> None:
        parts = self._parts
        if parts and not self._transport.is_closing():
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))
        parts.clear()
