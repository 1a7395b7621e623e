"""What a runner without a model writes into KV blocks instead of keys and values.

A token has a cell in every slab (layer, K or V, head) of its block, so that a slab which is
missing, stale, foreign or in the wrong place shows, whatever plans wrote and read it::

    K   token id (4 bytes) · position (4) · word, again and again to the end
    V   word, again and again

    word = check ^ a number of layer and head     check = xxh3-64(check before, token id, position)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import xxhash

from core.kv.geometry import KVGroup
from core.types import BLOCK_TOKENS

_HEAD = struct.Struct("<II")
_LINK = struct.Struct("<QII")
SMALLEST = _HEAD.size
_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Broken(Exception):
    """A cell does not hold what was computed for its position."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the KV of position {position} is not what was computed there")
        self.position = position


def next_check(check: int, token_id: int, position: int) -> int:
    return xxhash.xxh3_64_intdigest(_LINK.pack(check, token_id, position))


def rows(
    group: KVGroup, token_ids: Sequence[int], checks: Sequence[int], start: int
) -> Iterator[bytes]:
    """The cells of `token_ids`, whose first position is `start`, in each slab of `group` in pool
    order."""
    size = group.head_dim
    heads = [_HEAD.pack(token, start + n) for n, token in enumerate(token_ids)]
    repeats = -(-size // 8)
    for layer in range(group.first_layer, group.first_layer + group.layers):
        words = [
            [
                ((check ^ _mark(layer, head)).to_bytes(8, "little") * repeats)[:size]
                for check in checks
            ]
            for head in range(group.first_head, group.first_head + group.kv_heads)
        ]
        for of_head in words:
            yield b"".join(a + b[: size - 8] for a, b in zip(heads, of_head, strict=True))
        for of_head in words:
            yield b"".join(of_head)


def prove(
    group: KVGroup, data: bytes, start: int, count: int, check: int
) -> tuple[int, tuple[int, ...]]:
    """Read the first `count` cells of a block whose first position is `start`, after `check`: the
    check of the last one and the token ids. Raises Broken when a cell is not what was computed."""
    size, slab = group.head_dim, group.slab_bytes
    ids: list[int] = []
    checks: list[int] = []
    for cell in range(count):
        token_id, _ = _HEAD.unpack_from(data, cell * size)
        check = next_check(check, token_id, start + cell)
        ids.append(token_id)
        checks.append(check)
    broken = [
        _first_difference(data[at : at + len(row)], row) // size
        for at, row in zip(range(0, len(data), slab), rows(group, ids, checks, start), strict=True)
        if data[at : at + len(row)] != row
    ]
    if broken:
        raise Broken(start + min(broken))
    return check, tuple(ids)


def fill_blocks(group: KVGroup, token_ids: Sequence[int]) -> list[bytes]:
    """The blocks that hold `token_ids` from position 0; what is past their end is zero."""
    blocks: list[bytes] = []
    check = 0
    for start in range(0, len(token_ids), BLOCK_TOKENS):
        ids = token_ids[start : start + BLOCK_TOKENS]
        checks: list[int] = []
        for position, token_id in enumerate(ids, start=start):
            check = next_check(check, token_id, position)
            checks.append(check)
        parts = rows(group, ids, checks, start)
        blocks.append(b"".join(part.ljust(group.slab_bytes, b"\0") for part in parts))
    return blocks


def _mark(layer: int, head: int) -> int:
    return ((layer << 16) + head) * _ODD & _MASK


def _first_difference(one: bytes, other: bytes) -> int:
    return next(n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
