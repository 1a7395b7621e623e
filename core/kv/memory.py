"""Anonymous memory that a rank and its node front share: the KV pool on CPU.

Nothing is named in a file system, so nothing is left behind when a process is killed: the memory
lives as long as one of the two holds the descriptor, which travels over their Unix socket.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile


def allocate(nbytes: int) -> tuple[int, mmap.mmap]:
    """A new zeroed region and its file descriptor; the caller closes both. Its size cannot change
    any more, so whoever maps it need not fear to read past its end (Linux)."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("skerry-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    else:  # macOS: a file that is unlinked while open
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, nbytes)
    return descriptor, attach(descriptor, nbytes)


def attach(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map a region that the other process allocated."""
    return mmap.mmap(descriptor, nbytes)
