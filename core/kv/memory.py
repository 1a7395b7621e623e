"""Anonymous memory that a rank and its node front share: the KV pool on CPU.

Nothing is named in a file system, so nothing is left behind when a process is killed: the memory
lives as long as one of the two holds the descriptor, which travels over their Unix socket.
"""

from __future__ import annotations

import mmap
import os
import tempfile


def allocate(nbytes: int) -> tuple[int, mmap.mmap]:
    """A new zeroed region and its file descriptor; the caller closes both."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("skerry-kv", os.MFD_CLOEXEC)
    else:  # macOS: a file that is unlinked while open
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, nbytes)
    return descriptor, attach(descriptor, nbytes)


def attach(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map a region that the other process allocated."""
    return mmap.mmap(descriptor, nbytes)
