"""What a kept block is made of: one piece for each rank and KV group, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from core.kv.geometry import KVGeometry

SHAPE_BYTES = 16


class Part(NamedTuple):
    """One rank's share of one KV group of a block."""

    rank: int
    group: int
    size: int


@dataclass(frozen=True, slots=True)
class Shape:
    """`digest` stands for the model and for how its ranks share its KV: two shapes that differ in
    either have no use for each other's blocks."""

    parts: tuple[Part, ...]
    digest: bytes

    @classmethod
    def of(cls, fingerprint: bytes, geometries: Mapping[int, KVGeometry]) -> Shape:
        """`geometries`: of all ranks of a pool."""
        parts = tuple(
            Part(rank, index, group.block_bytes)
            for rank, geometry in sorted(geometries.items())
            for index, group in enumerate(geometry.groups)
            if group.layers
        )
        told = [(rank, geometry.groups) for rank, geometry in sorted(geometries.items())]
        data = fingerprint + b"\0" + msgspec.msgpack.encode(told)
        return cls(parts, blake2b(data, digest_size=SHAPE_BYTES, person=b"skerry-tier").digest())

    @property
    def block_bytes(self) -> int:
        """Of a block with all of its groups."""
        return sum(part.size for part in self.parts)

    def spans(self, groups: int) -> Iterator[tuple[Part, int, int]]:
        """(part, start, end) of what a block holds whose KV groups are the bits of `groups`."""
        start = 0
        for part in self.parts:
            if groups >> part.group & 1:
                yield part, start, start + part.size
                start += part.size

    def size(self, groups: int) -> int:
        return sum(part.size for part in self.parts if groups >> part.group & 1)
