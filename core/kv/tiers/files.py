"""What a slab asks of the file system."""

from __future__ import annotations

import errno
import os
from typing import Protocol


class File(Protocol):
    """One open file. Every method may raise OSError."""

    def read(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes: fewer only at the end of the file."""
        ...

    def write(self, data: bytes | bytearray, offset: int) -> None:
        """All of it."""
        ...

    def truncate(self) -> None:
        """Nothing is left."""
        ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class SystemFile:
    """See `File`. Owns `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, size: int, offset: int) -> bytes:
        pieces: list[bytes] = []
        while size:
            piece = os.pread(self._descriptor, size, offset)
            if not piece:
                break
            pieces.append(piece)
            size -= len(piece)
            offset += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def write(self, data: bytes | bytearray, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            if not written:
                raise OSError(errno.EIO, "nothing was written")
            view = view[written:]
            offset += written

    def truncate(self) -> None:
        os.ftruncate(self._descriptor, 0)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
