"""How fast the files of a model come from the disk, when nothing of them is in memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PIECE_BYTES = 4 << 20


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def evict(files: list[Path]) -> None:
    """Ask the system to forget them; it does where nobody has them mapped."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not on the disk yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def seconds(files: list[Path]) -> float:
    """To read all of them once, from start to end."""
    piece = bytearray(_PIECE_BYTES)
    began = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return time.perf_counter() - began
