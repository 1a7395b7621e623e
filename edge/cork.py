"""A transport that sends an answer's head together with what follows it.

A server writes head and first part apart, and every piece on a socket costs a call to the kernel
and wakes the reader on the other side. Later parts go out at once.
"""

from __future__ import annotations

import asyncio
from typing import Any

_HEAD = b"HTTP/"


class Corked:
    """Stands before a transport for a protocol that writes; all else is the transport's own."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data[: len(_HEAD)] == _HEAD:
            self._head = data
            self._loop.call_soon(self._flush)  # where nothing follows in this turn of the loop
            return
        self._transport.write(data)

    def close(self) -> None:
        """After what was written."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._head = b""
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:  # the rest of the interface, as it is
        return getattr(self._transport, name)

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""
