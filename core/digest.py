"""A cache digest: a filter that says, of a chain id, "surely not held" or "probably held".

Ten bits an entry with four probes: one id in 85 that is not held is taken for held, and costs its
request a prefill that another region might have spared. Ids are already keyed hashes
(core.prefix), so their own bits are the probes; whoever lacks the fleet secret cannot make one.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from itertools import islice

import msgspec

BITS_PER_ENTRY = 10
MAX_ENTRIES = 16384
"""A digest takes 20 kB at the most, and some 15 ms to make."""

_BIT = tuple(1 << place for place in range(8))
_halves = struct.Struct("<II").unpack


class Filter(msgspec.Struct, frozen=True):
    """`bits` in rising order within each byte; empty holds nothing."""

    bits: bytes = b""

    def holds(self, one: bytes) -> bool:
        """Whether `one` (an id of 8 bytes) is probably in."""
        bits = self.bits
        if not bits:
            return False
        size = len(bits) * 8
        first, second, third, fourth = _places(one, size)
        return bool(
            bits[first >> 3] & _BIT[first & 7]
            and bits[second >> 3] & _BIT[second & 7]
            and bits[third >> 3] & _BIT[third & 7]
            and bits[fourth >> 3] & _BIT[fourth & 7]
        )


def build(ids: Collection[bytes]) -> Filter:
    """The filter of up to `MAX_ENTRIES` ids; what is over is left out."""
    taken = min(len(ids), MAX_ENTRIES)
    if not taken:
        return Filter()
    size = max(64, -(-taken * BITS_PER_ENTRY // 8) * 8)
    bits = bytearray(size // 8)
    for one in islice(ids, taken):
        for at in _places(one, size):
            bits[at >> 3] |= _BIT[at & 7]
    return Filter(bytes(bits))


def _places(one: bytes, size: int) -> tuple[int, int, int, int]:
    """Four bits of the filter for an id, by double hashing out of its own halves."""
    low, high = _halves(one)
    step = high | 1
    return low % size, (low + step) % size, (low + 2 * step) % size, (low + 3 * step) % size
