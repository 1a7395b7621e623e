"""Which row of a ragged batch a tile belongs to, without a map from the host.

With tiles of `size` items, row r's tiles begin at (first_r − first_0) // size + r: increasing in r,
and never less than what the rows before it need. Tiles in between have nothing to do.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_row(firsts, rows, stride, tile, size):
    """The last row whose tiles begin at or before `tile`; firsts [rows], `stride` apart."""
    origin = tl.load(firsts)
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(firsts + middle * stride) - origin) // size + middle <= tile:
            low = middle
        else:
            high = middle
    return low
