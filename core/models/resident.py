"""Brings mapped weights into memory in one go, ahead of their first use.

A mapped file is read page by page as it is touched, which is slow and falls into the first steps.
Where the system cannot be told (it is Linux that can), that is what happens, and nothing else.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

_WILLNEED = 3
_POPULATE_READ = 22
_LEAST_BYTES = 1 << 16
"""Less than this is not worth a call."""


def bring_in(data: Tensor) -> None:
    """Have the pages under `data`, a view of a mapped file, read and mapped. What a view skips
    between its rows comes along."""
    if not sys.platform.startswith("linux") or not data.numel():
        return
    spans = zip(data.shape, data.stride(), strict=True)
    nbytes = (sum((size - 1) * stride for size, stride in spans) + 1) * data.element_size()
    if nbytes < _LEAST_BYTES:
        return
    first = data.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    place, length = ctypes.c_void_p(first), ctypes.c_size_t(data.data_ptr() + nbytes - first)
    advise = ctypes.CDLL(None).madvise
    for advice in (_WILLNEED, _POPULATE_READ):  # an advice: nothing depends on what comes of it
        advise(place, length, ctypes.c_int(advice))
